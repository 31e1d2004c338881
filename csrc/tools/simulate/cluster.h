// What a simulation in virtual time consists of: a machine's times, GPUs with their shared
// resources, and heaps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tools/simulate/clock.h"

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

// A shared resource, which serves one after the other in the order in which they come.
struct Server {
    double free = 0, busy = 0;

    // Returns when a use that comes at `time` and takes `lasts` is done.
    double use(double time, double lasts) {
        free = std::max(free, time) + lasts;
        busy += lasts;
        return free;
    }
};

struct VirtualGpu {
    std::vector<Server> sms;
    Server memory, link_out, link_in, card_out, card_in;
};

// Rows may have fewer bytes than the real ones, which they stand for and which take the time.
struct RowSize {
    size_t payload = 1, scales = 0;
    double real_payload = 1, real_scales = 0, real_slot = 1;

    double real(size_t bytes) const {
        if (scales && bytes == scales) return real_scales;
        const double part = static_cast<double>(std::min(bytes, payload)) * real_payload /
                            static_cast<double>(payload);
        return scales && bytes >= payload + scales ? part + real_scales : part;
    }
};

// The ranks that are simulated: their GPUs and heaps.
struct VirtualCluster {
    Machine machine;
    VirtualClock clock;
    std::vector<VirtualGpu> gpus;
    std::vector<char*> heaps;             // by rank
    std::vector<ControlBlock*> controls;  // by rank; where the heaps begin, unless set otherwise
    size_t heap_bytes;
    RowSize row;
    bool rows_have_bytes = true;  // else rows only take time, and are not read
    bool sums_rows = false;       // else a sum is a copy of its first row
    uint64_t call = 0;
    uint64_t rows_moved = 0;  // copies and sums so far

    VirtualCluster(const Machine& of, std::vector<char*> memory, size_t bytes, uint64_t seed = 0)
        : machine(of),
          clock(seed),
          gpus(memory.size()),
          heaps(std::move(memory)),
          heap_bytes(bytes) {
        for (size_t rank = 0; rank < heaps.size(); ++rank) {
            controls.push_back(reinterpret_cast<ControlBlock*>(heaps[rank]));
            by_address_.emplace_back(heaps[rank], static_cast<int>(rank));
        }
        std::sort(by_address_.begin(), by_address_.end());
        reset_servers();
    }

    // The rank whose heap an address is in; -1: none.
    int owner_of(const void* address) const {
        const auto* byte = static_cast<const char*>(address);
        const auto after = std::upper_bound(
            by_address_.begin(), by_address_.end(), byte,
            [](const char* wanted, const auto& heap) { return wanted < heap.first; });
        if (after == by_address_.begin()) return -1;
        const auto& [first, rank] = *(after - 1);
        return byte < first + heap_bytes ? rank : -1;
    }
    ControlBlock& control(int rank) const { return *controls[rank]; }

    void reset_servers() {
        for (VirtualGpu& gpu : gpus) {
            gpu = {};
            gpu.sms.resize(machine.sms);
        }
    }

  private:
    std::vector<std::pair<const char*, int>> by_address_;
};

}  // namespace ep
