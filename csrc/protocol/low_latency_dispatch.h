#pragma once

#include "protocol/low_latency_dispatch_receive.h"
#include "protocol/low_latency_dispatch_send.h"
#include "protocol/low_latency_lines_receive.h"
#include "protocol/low_latency_lines_send.h"

namespace ep {

// The halves of a low-latency dispatch, and both in one launch.

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

template <RowKind kRows, bool kLines, WarpLike W, class F>
EP_FN Ended low_latency_dispatch_send(W& warp, const LowLatencyDispatch<F>& call,
                                      const Team& team) {
    if (!may_send(warp, call, team)) return Ended::Failed;
    if (!send_dispatch<kRows, kLines>(warp, call, team)) return Ended::Failed;
    signal_rows(warp, call, team);
    return end_sending(warp, call, team);
}

template <RowKind kRows, bool kLines, WarpLike W, class F>
EP_FN Ended low_latency_dispatch_receive(W& warp, const LowLatencyDispatch<F>& call,
                                         const Team& team) {
    if (!receive_dispatch<kRows, kLines>(warp, call, team)) return Ended::Failed;
    const Ended ended = end_receiving(warp, call, team);
    if (ended == Ended::Last) end_dispatch(warp, call.args);
    return ended;
}

// Runs both halves in one launch.
template <RowKind kRows, bool kLines, WarpLike W, class F>
EP_FN Ended low_latency_dispatch(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    const Ended ended = send_and_receive(
        warp, call, team, Role::LowLatencyReceiver,
        [&] { return send_dispatch<kRows, kLines>(warp, call, team); },
        [&] { return receive_dispatch<kRows, kLines>(warp, call, team); });
    if (ended == Ended::Last) end_dispatch(warp, call.args);
    return ended;
}

}  // namespace ep
