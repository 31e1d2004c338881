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
        [&] { return receive_dispatch<kRows, kLines>(warp, call, team); });
    if (receives(kLaunches) && ended == Ended::Last) end_dispatch(warp, call.args);
    return ended;
}

}  // namespace ep
