#pragma once

#include "core/args.h"
#include "exec/warp.h"

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

// f(row, places): for each row that arrived here, `position` of each k set and those >= 0 as bits.
template <WarpLike W, class F>
EP_FN void for_known_rows(W& warp, const TransferArgs& args, int part, int parts,
                          typename W::template PerLane<int>& position, F&& f) {
    typename W::template PerLane<int> following;
    const int topk = args.format.topk;
    const int64_t rows = known_rows(args);
    auto read = [&](int64_t row) {
        warp.lanes(topk, [&](int k) { following[k] = args.positions[row * topk + k]; });
    };
    if (part < rows) read(part);
    for (int64_t row = part; row < rows; row += parts) {
        position = following;
        if (row + parts < rows) read(row + parts);
        f(row, warp.ballot(topk, [&](int k) { return position[k] >= 0; }));
    }
}

// From a row's first place to the others, with its scales.
template <WarpLike W>
EP_FN void copy_to_other_places(W& warp, const DispatchArgs& args, int part, int parts) {
    const RowFormat& format = args.format;
    typename W::template PerLane<int> position;
    typename W::template PerLane<void*> to;
    for_known_rows(warp, args, part, parts, position, [&](int64_t, uint32_t places) {
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

// What combine sends for a row that has several places.
// kWeighted: multiplies the row of each expert by its weight.
template <class T, bool kWeighted, WarpLike W>
EP_FN void sum_places(W& warp, const CombineArgs& args, int part, int parts) {
    const size_t bytes = args.format.payload_bytes;
    typename W::template PerLane<int> position;
    typename W::template PerLane<const void*> row;
    typename W::template PerLane<Accumulator<T>> weight;
    for_known_rows(warp, args, part, parts, position, [&](int64_t received, uint32_t places) {
        if (!(places & (places - 1))) return;
        warp.lanes(args.format.topk, [&](int k) {
            if (position[k] < 0) return;
            row[k] = args.x + position[k] * bytes;
            if constexpr (kWeighted)
                weight[k] = static_cast<const Accumulator<T>*>(args.row_weights)[position[k]];
        });
        char* sum = args.sums + received * bytes;
        if constexpr (kWeighted) {
            warp.template weighted_sum<T, Reuse::Late>(sum, row, weight, places, bytes / sizeof(T));
        } else {
            warp.template sum<T, Reuse::Late>(sum, row, places, bytes / sizeof(T));
        }
    });
}

}  // namespace ep
