#pragma once

namespace ep {

// Times of a machine: the constants of virtual time, in ns and in GB/s, which are bytes per ns.
// megatron_ep/tools/simulate/machines has them, each with its origin.
struct Machine {
    int sms = 0;  // per GPU

    // A warp
    double step = 0;           // one step of the lanes
    double ballot = 0;         // a ballot, or another exchange between lanes
    double poll = 0;           // one load of a flag; the loads of a lane add up
    double gather = 0;         // eight loads of a lane in sequence
    double flag_store = 0;     // until the warp continues
    double first_bytes = 0;    // of a row that is read, until they arrive
    double warp_copy = 0;      // GB/s
    double warp_sum = 0;       // GB/s, of all rows of a sum
    double warp_quantize = 0;  // GB/s, of bf16 that becomes fp8

    // An SM, a GPU
    double sm_store = 0, sm_read = 0, sm_sum = 0;  // GB/s
    double memory = 0;                             // GB/s: memory, and the cache before it
    double own_write = 0, peer_write = 0;          // until stores have been written
    double own_flag = 0, peer_flag = 0;            // until a flag is seen
    double link = 0;                               // GB/s of NVLink, each direction
    double link_slack = 0;                         // ns that a warp may be ahead of it
    double launch = 0;                             // until the first warp runs
    double join = 0;                               // of streams that run side by side

    // A network card
    double card = 0;           // GB/s
    double card_message = 0;   // of the card, besides the bytes
    double card_post = 0;      // of the warp
    double card_doorbell = 0;  // until the card begins
    double card_way = 0;       // to the other card
    double card_signal = 0;    // until a flag that came with a message is seen
    double card_turn = 0;      // bytes after which the next queue pair has its turn; 0: none
};

}  // namespace ep
