#pragma once

#include "protocol/low_latency_mask.h"

namespace ep {

// Both halves of a call in one launch: each warp sends its share, then receives its share. With few
// rows most warps have none to send and are ready when the first ones come; with many all warps
// send. What the warps on the GPU send arrives, whatever they wait for afterwards.
//
// send() and receive(): a warp's share; false: it ended badly. role: that of the receivers.
//
// The halves end together, but with masking other ranks wait for all that this one sends. A rank
// that the sending half left out is left out of the receiving half, too.
template <WarpLike W, class F, class Args, class Send, class Receive>
EP_FN Ended send_and_receive(W& warp, const LowLatencyCall<F, Args>& call, const Team& team,
                             Role role, Send&& send, Receive&& receive) {
    const LowLatencyHeap& heap = call.heap();
    if (!may_send(warp, call, team)) return Ended::Badly;
    if (!send()) return Ended::Badly;
    signal_rows(warp, call, team);
    if (call.masking() &&
        is_last(warp, call.fabric.template own<uint64_t>(heap.send_joins(Args::kKind)), team))
        publish_all_sent(warp, call);
    warp.begin_half(role);
    if (!receive()) return Ended::Badly;
    const Ended ended = end_receiving(warp, call, team);
    if (ended == Ended::Last) count_sent(warp, call);
    return ended;
}

}  // namespace ep
