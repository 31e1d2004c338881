#pragma once

#include "protocol/low_latency_mask.h"

namespace ep {

// Both halves of a call as one launch: each warp sends its share, then receives its share. Of few
// rows most warps have none to send, and so are there when the first ones come; of many all warps
// send. What the warps send that are on the GPU arrives, whatever they wait for afterwards.
//
// send and receive(): a warp's share, false: it ended badly. role: of the receivers.
//
// The ends of the halves are one, but with masking others wait for all that this rank sends. A rank
// that the sending half was without, the receiving half is without, too.
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
