// The expert rows of an arrived row, as combine and the intra-rank pass use them.
#pragma once

#include <type_traits>

#include "core/args.h"
#include "exec/warp.h"
#include "protocol/weights.h"

namespace ep {

// Reads the expert rows of one arrived row: for each k its row here, kElsewhere or kOverflowed. A
// flat row is its own expert row, for k = 0.
template <WarpLike W>
EP_FN void read_dst_rows(W& warp, const TransferArgs& args, int64_t received,
                         PerLane<W, int>& dst_row) {
    if (args.is_flat) {
        warp.lanes(args.format.topk, [&](int k) {
            dst_row[k] = k == 0 && received < args.max_rows ? static_cast<int>(received)
                                                            : TransferArgs::kElsewhere;
        });
        return;
    }
    warp.lanes(args.format.topk, [&](int k) {
        dst_row[k] = received < args.max_received ? args.dst_rows[received * args.format.topk + k]
                                                  : TransferArgs::kOverflowed;
    });
}

// Returns the weight, or its gradient, of the k-th choice of an arrived row: that of the expert
// row, or the k-th weight of a flat row.
EP_FN uint64_t weight_of(const CombineArgs& args, int64_t received, int k, int dst_row) {
    const int64_t number = args.is_flat ? received * args.format.topk + k : dst_row;
    if (args.is_flat ? received >= args.max_rows : dst_row < 0) return 0;
    return load_weight(args.weights + number * args.format.weight_bytes, args.format.weight_bytes);
}

// The expert rows of one arrived row, and the factor of each in their sum.
template <class T, bool kWeighted, WarpLike W>
struct ExpertRows {
    PerLane<W, const void*> row;
    std::conditional_t<kWeighted, PerLane<W, Accumulator<T>>, Unweighted> weight;
    uint32_t lanes;

    EP_FN ExpertRows(W& warp, const CombineArgs& args, const PerLane<W, int>& dst_row) {
        const int topk = args.format.topk;
        warp.lanes(topk, [&](int k) {
            if (dst_row[k] < 0) return;
            row[k] = args.x + static_cast<int64_t>(dst_row[k]) * args.format.payload_bytes;
            if constexpr (kWeighted)
                weight[k] = static_cast<const Accumulator<T>*>(args.row_weights)[dst_row[k]];
        });
        lanes = warp.ballot(topk, [&](int k) { return dst_row[k] >= 0; });
    }

    EP_FN void sum(W& warp, const CombineArgs& args, char* to) const {
        warp.template sum<T, CacheHint::EvictFirst>(to, row, weight, lanes,
                                                    args.format.payload_bytes / sizeof(T));
    }

    // Whether the sum is one of the rows, unchanged.
    EP_FN bool is_one_row() const { return !kWeighted && lanes && !(lanes & (lanes - 1)); }

    // Returns where the sum lies once the intra-rank pass has made it.
    EP_FN const char* summed(W& warp, const CombineArgs& args, int64_t received) const {
        if (is_one_row()) return static_cast<const char*>(warp.broadcast(row, lowest_lane(lanes)));
        return args.sums + received * args.format.payload_bytes;
    }
};

}  // namespace ep
