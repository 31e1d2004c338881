#pragma once

#include "core/args.h"
#include "exec/warp.h"
#include "protocol/places.h"

namespace ep {

// What concerns one rank alone, and waits for nobody: behind dispatch, to bring a row to all of its
// places and to clear those that no row has; before combine, to sum what lies in a row's places. A
// launch of its own may do it with more warps than exchange the rows. Each of `parts` warps does
// its part.

// Rows that arrived here and that `positions` knows.
EP_FN int64_t known_rows(const TransferArgs& args) {
    const int64_t received = args.layout.totals().received_rows;
    return received < args.max_received ? received : args.max_received;
}

// f(row, position): each of these rows, and where its experts' rows lie.
template <WarpLike W, class F>
EP_FN void for_known_rows(W& warp, const TransferArgs& args, int part, int parts, F&& f) {
    typename W::template PerLane<int> position, following;
    const int64_t rows = known_rows(args);
    read_positions(warp, args, part, following);
    for (int64_t row = part; row < rows; row += parts) {
        position = following;
        read_positions(warp, args, row + parts, following);
        f(row, position);
    }
}

// From a row's first place to the others, with its scales.
template <WarpLike W>
EP_FN void copy_to_other_places(W& warp, const DispatchArgs& args, int part, int parts) {
    const RowFormat& format = args.format;
    typename W::template PerLane<void*> to;
    for_known_rows(warp, args, part, parts, [&](int64_t, const auto& position) {
        const uint32_t places = warp.ballot(format.topk, [&](int k) { return position[k] >= 0; });
        const uint32_t others = places & (places - 1);
        if (!others) return;
        const int64_t first = warp.broadcast(position, lowest_lane(places));
        auto copy = [&](char* rows, size_t bytes) {
            const char* source = rows + first * bytes;
            warp.template stage<Reuse::Late>(source, bytes);
            warp.lanes(format.topk, [&](int k) {
                if (others >> k & 1) to[k] = rows + position[k] * bytes;
            });
            warp.template multicast<Reuse::Late>(to, others, source, bytes);
        };
        copy(args.recv_x, format.payload_bytes);
        if (format.scale_bytes) copy(args.recv_scales, format.scale_bytes);
    });
}

template <WarpLike W>
EP_FN void clear_rows(W& warp, const DispatchArgs& args, int64_t first, int64_t end) {
    const RowFormat& format = args.format;
    if (end > args.max_rows) end = args.max_rows;
    if (first >= end) return;
    warp.zero(args.recv_x + first * format.payload_bytes, (end - first) * format.payload_bytes);
    warp.zero(args.recv_scales + first * format.scale_bytes, (end - first) * format.scale_bytes);
    warp.zero(args.recv_weights + first * format.weight_bytes, (end - first) * format.weight_bytes);
}

// Rows that no token fills hold zeros, and so do their scales and weights: the padding of an
// expert, and what lies behind the last expert.
template <WarpLike W>
EP_FN void clear_unfilled(W& warp, const DispatchArgs& args, int part, int parts) {
    const Layout& layout = args.layout;
    for (int expert = part; expert < layout.local_experts(); expert += parts) {
        clear_rows(warp, args, layout.expert_start(expert) + layout.expert_count(expert),
                   layout.expert_start(expert + 1));
    }
    if (!args.clears_end) return;
    constexpr int64_t kPiece = 16;  // rows
    for (int64_t first = layout.expert_start(layout.local_experts()) + kPiece * part;
         first < args.max_rows; first += kPiece * parts)
        clear_rows(warp, args, first, first + kPiece);
}

// The sum of a row's places, where that is more than the one row.
template <class T, bool kWeighted, WarpLike W>
EP_FN void sum_places(W& warp, const CombineArgs& args, int part, int parts) {
    const size_t bytes = args.format.payload_bytes;
    if (part == 0) warp.zero(args.sums + args.max_received * bytes, bytes);
    for_known_rows(warp, args, part, parts, [&](int64_t received, const auto& position) {
        const ExpertRows<T, kWeighted, W> rows(warp, args, position);
        if (rows.lanes && !rows.is_one_row()) rows.sum(warp, args, args.sums + received * bytes);
    });
}

}  // namespace ep
