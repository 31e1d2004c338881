#pragma once

#include "protocol/low_latency_dispatch_receive.h"
#include "protocol/low_latency_dispatch_send.h"
#include "protocol/low_latency_lines_receive.h"
#include "protocol/low_latency_lines_send.h"

namespace ep {

// A low-latency dispatch: one of its halves, or both in one launch.

// kLines: whether rows are lines, as the heap says; flat rows always are.

// Sends a warp's share.
template <RowKind kRows, bool kLines, WarpLike W, class F>
EP_FN bool send_dispatch(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    constexpr bool kQuantize = kRows == RowKind::Quantized;
    if constexpr (kLines && F::kKeepsLines) return send_by_lines<kQuantize>(warp, call, team);
    return send_by_slots<kQuantize>(warp, call, team);
}

// Receives a warp's share.
template <RowKind kRows, bool kLines, WarpLike W, class F>
EP_FN bool receive_dispatch(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    if constexpr (kLines && F::kKeepsLines)
        return receive_by_lines<kRows == RowKind::Flat>(warp, call, team);
    return receive_by_slots(warp, call, team);
}

// Called by every warp between its shares of the halves of one launch: the one that tells a waiting
// host the number of rows waits until all others have sent theirs, and so have checked their ids.
template <WarpLike W, class F>
EP_FN bool wait_for_checked_ids(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    if (!call.args.report.totals) return true;
    uint64_t* sent = call.word(call.heap().send_joins(call.kKind));
    const uint64_t before = warp.template arrive<Scope::Rank>(sent);
    if (!notes_starts(team)) return true;
    const uint64_t all = (quotient(before, team.warps) + 1) * team.warps;
    return warp.wait_all(Wait::Choices, 1, [&](int) {
        return WaitCondition{W::template acquire<Scope::Rank>(sent), all, call.args.rank};
    });
}

// Called by the last warp.
template <WarpLike W>
EP_FN void end_dispatch(W& warp, const LowLatencyDispatchArgs& args) {
    count_rows(warp, args);
    omit_tokens(warp, args);
}

template <LowLatencyLaunches kLaunches, RowKind kRows, bool kLines, WarpLike W, class F>
EP_FN Ended low_latency_dispatch(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    const Ended ended = run_halves<kLaunches>(
        warp, call, team, [&] { return send_dispatch<kRows, kLines>(warp, call, team); },
        [&] {
            if (kLaunches == LowLatencyLaunches::Both && !wait_for_checked_ids(warp, call, team))
                return false;
            return receive_dispatch<kRows, kLines>(warp, call, team);
        });
    if (receives(kLaunches) && ended == Ended::Last) end_dispatch(warp, call.args);
    return ended;
}

}  // namespace ep
