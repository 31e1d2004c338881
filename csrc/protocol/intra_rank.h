#pragma once

#include "core/args.h"
#include "exec/warp.h"
#include "protocol/combine.h"
#include "protocol/expert_rows.h"

namespace ep {

// The intra-rank pass permutes and sums rows inside one rank. It waits for no other rank, so
// separate kernels can run it with more warps than exchange rows:
//   during dispatch's exchange   writes this rank's own rows to their output rows
//   after it                     copies rows of other ranks from their first output row to the
//                                others, and clears output rows that no token fills
//   during combine's exchange    sums the expert rows of each arrived row; combine waits for them

// Rows from other ranks that arrived here and that `dst_rows` has room for. Arrived rows are
// ordered by source rank.
struct KnownRows {
    int64_t count, own_first, own_count;

    explicit EP_FN KnownRows(const TransferArgs& args) {
        const Layout& layout = args.layout;
        const int next = args.rank + 1;
        const int64_t received = layout.totals().received_rows;
        const int64_t end = next < layout.world() ? layout.received_start(0, next) : received;
        const int64_t known = received < args.max_received ? received : args.max_received;
        auto known_before = [&](int64_t row) { return row < known ? row : known; };
        own_first = known_before(layout.received_start(0, args.rank));
        own_count = known_before(end) - own_first;
        count = known - own_count;
    }
    EP_FN int64_t row(int64_t i) const { return i < own_first ? i : i + own_count; }
};

// Calls f(dst_row) for the warp's share of these rows: lane k has the k-th output row.
template <WarpLike W, class F>
EP_FN void for_rows(W& warp, const TransferArgs& args, const KnownRows& rows, int part, int parts,
                    F&& f) {
    PerLane<W, int> dst_row, following;
    read_dst_rows(warp, args, rows.row(part), following);
    for (int64_t i = part; i < rows.count; i += parts) {
        dst_row = following;
        read_dst_rows(warp, args, rows.row(i + parts), following);
        f(dst_row);
    }
}

// Copies rows and scales from a row's first output row to its others; a warp's share.
template <WarpLike W>
EP_FN void copy_to_other_output_rows(W& warp, const DispatchArgs& args, int part, int parts) {
    const RowFormat& format = args.format;
    PerLane<W, void*> to;
    const KnownRows rows_of_others(args);
    for_rows(warp, args, rows_of_others, part, parts, [&](const auto& dst_row) {
        const uint32_t all = warp.ballot(format.topk, [&](int k) { return dst_row[k] >= 0; });
        const uint32_t others = all & (all - 1);
        if (!others) return;
        const int64_t first = warp.broadcast(dst_row, lowest_lane(all));
        auto copy = [&](char* rows, size_t bytes) {
            const char* source = rows + first * bytes;
            warp.template stage<CacheHint::EvictFirst>(source, bytes);
            warp.lanes(format.topk, [&](int k) {
                if (others >> k & 1) to[k] = rows + dst_row[k] * bytes;
            });
            warp.template multicast<CacheHint::EvictFirst>(to, others, source, bytes);
        };
        copy(args.recv_x, format.payload_bytes);
        if (format.scale_bytes) copy(args.recv_scales, format.scale_bytes);
    });
}

// Zeros the weights of rows [first, end), and if `all` the rows and their scales.
template <WarpLike W>
EP_FN void clear_rows(W& warp, const DispatchArgs& args, int64_t first, int64_t end, bool all) {
    const RowFormat& format = args.format;
    if (end > args.max_rows) end = args.max_rows;
    if (first >= end) return;
    warp.zero(args.recv_weights + first * args.row_weight_bytes(),
              (end - first) * args.row_weight_bytes());
    if (!all) return;
    warp.zero(args.recv_x + first * format.payload_bytes, (end - first) * format.payload_bytes);
    warp.zero(args.recv_scales + first * format.scale_bytes, (end - first) * format.scale_bytes);
}

// Zeros rows from `last` on, in pieces; a warp's share. Without clears_end, only their weights.
template <WarpLike W>
EP_FN void clear_end(W& warp, const DispatchArgs& args, int64_t last, int part, int parts) {
    constexpr int64_t kPiece = 16;  // rows
    const bool has_experts = args.is_flat && args.fills_tables;
    if (!args.clears_end && !has_experts && !args.format.weight_bytes) return;
    for (int64_t first = last + kPiece * part; first < args.max_rows; first += kPiece * parts) {
        const int64_t end = first + kPiece < args.max_rows ? first + kPiece : args.max_rows;
        clear_rows(warp, args, first, end, args.clears_end);
        for (int64_t row = first; has_experts && row < end; ++row) {
            warp.lanes(args.format.topk, [&](int k) {
                args.dst_rows[row * args.format.topk + k] = TransferArgs::kElsewhere;
            });
        }
    }
}

// Zeros the output rows that no token fills, with their scales and weights: each expert's padding
// (without clears_padding only its weights), and what follows the last expert's rows (see
// clear_end). Flat rows there get no expert either.
template <WarpLike W>
EP_FN void clear_unfilled(W& warp, const DispatchArgs& args, int part, int parts) {
    const Layout& layout = args.layout;
    if (args.is_flat) return clear_end(warp, args, layout.totals().received_rows, part, parts);
    for (int expert = part; expert < layout.local_experts(); expert += parts) {
        clear_rows(warp, args, layout.expert_start(expert) + layout.expert_count(expert),
                   layout.expert_start(expert + 1), args.clears_padding);
    }
    clear_end(warp, args, layout.expert_start(layout.local_experts()), part, parts);
}

// Sums the expert rows of each row that `rank` (or this rank) sent on a channel: the share of warp
// `part`, in order. Publishes after each sum how many are done.
template <class T, bool kWeighted, WarpLike W, FabricLike<W> F>
EP_FN void sum_rows_of(W& warp, F& fabric, const CombineArgs& args, int channel, int rank,
                       int part) {
    const Rings<F> rings{fabric, args, channel};
    const int64_t first = args.layout.received_start(channel, rank);
    const int count = args.layout.received(channel, rank);
    PerLane<W, int> dst_row, following;
    uint64_t* summed = &rings.to_rank(rank).summed[part];
    read_dst_rows(warp, args, first + part, following);
    for (int i = part, done = 0; i < count; i += args.sum_warps) {
        dst_row = following;
        read_dst_rows(warp, args, first + i + args.sum_warps, following);
        const ExpertRows<T, kWeighted, W> rows(warp, args, dst_row);
        if (rows.lanes && !rows.is_one_row())
            rows.sum(warp, args, args.sums + (first + i) * args.format.payload_bytes);
        warp.template publish<Scope::Rank>(summed, ++done);
    }
}

// Pieces of sum_all_rows.
EP_HD int pieces_of_sums(const CombineArgs& args) {
    return args.layout.channels * args.layout.world() * args.sum_warps;
}

// Does so for the rows of all ranks on all channels: the share of warp `number` of `warps`. This
// rank's own rows come last.
template <class T, bool kWeighted, WarpLike W, FabricLike<W> F>
EP_FN void sum_all_rows(W& warp, F& fabric, const CombineArgs& args, int number, int warps) {
    const int channels = args.layout.channels, world = args.layout.world();
    for (int piece = number; piece < pieces_of_sums(args); piece += warps) {
        const int queue = piece / args.sum_warps;
        sum_rows_of<T, kWeighted>(warp, fabric, args, queue % channels,
                                  (args.rank + 1 + queue / channels) % world,
                                  piece % args.sum_warps);
    }
}

}  // namespace ep
