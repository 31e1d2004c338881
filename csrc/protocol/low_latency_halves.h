#pragma once

#include "protocol/low_latency_mask.h"

namespace ep {

// Both halves of a call as one launch: half of the warps send, the others receive meanwhile. A
// single warp does one after the other. The blocks of a launch have warps of both kinds, so all
// that those send which are on the GPU arrives, whatever the receivers wait for.
//
// announce(warp, call, team): what receivers send, who have nothing else to do at first. send and
// receive(warp, call, team): a warp's share, false: it ended badly. role: of the receivers.
//
// The ends of the halves are one, but with masking others wait for all that this rank sends. Whom
// the sending half was without the receiving half is without, too.
template <WarpLike W, class F, class Args, class Announce, class Send, class Receive>
EP_FN Ended send_and_receive(W& warp, F& fabric, const Args& args, const Team& team, Role role,
                             Announce&& announce, Send&& send, Receive&& receive) {
    const LowLatencyCall<F, Args> call = next_call(fabric, args);
    const int senders = team.warps - team.warps / 2;
    const bool alone = team.warps == 1, sends = team.warp < senders;
    const Team sending{team.warp, senders};
    const Team receiving = alone ? team : Team{team.warp - senders, team.warps - senders};
    // in the order of the receivers: in both halves the same warp speaks for all
    const Team all{(team.warp + team.warps - senders) % team.warps, team.warps};
    if (!may_send(warp, call, all)) return Ended::Badly;
    if (!sends || alone) announce(warp, call, receiving);
    if (sends && !send(warp, call, sending)) return Ended::Badly;
    signal_rows(warp, call, team);
    if (args.heap.masking &&
        is_last(warp, fabric.template own<uint64_t>(args.heap.send_joins(Args::kKind)), team))
        publish_all_sent(warp, call);
    if (!sends || alone) {
        warp.begin_half(role);
        if (!receive(warp, call, receiving)) return Ended::Badly;
    }
    const Ended ended = end_receiving(warp, call, team);
    if (ended == Ended::Last) count_sent(warp, call);
    return ended;
}

}  // namespace ep
