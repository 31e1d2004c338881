#pragma once

#include "protocol/low_latency_mask.h"

namespace ep {

// What low-latency combine does alike with and without lines.

// The factor at index `at` of the rows in sums of T.
template <class T>
EP_FN Accumulator<T> weight_at(const void* weights, int64_t at) {
    return static_cast<const Accumulator<T>*>(weights)[at];
}

// A row of the experts, and the value that travels with it: 0 for a row that had no room.
EP_FN const char* row_of(const LowLatencyCombineArgs& args, int64_t dst_row) {
    return args.x + dst_row * args.format.payload_bytes;
}
EP_FN uint64_t value_of(const LowLatencyCombineArgs& args, int64_t dst_row) {
    const int bytes = args.format.weight_bytes;
    return dst_row < 0 ? 0 : load_weight(args.values + dst_row * bytes, bytes);
}

// Stores the value that came back for a token's k-th choice.
EP_FN void store_value(const LowLatencyCombineArgs& args, int token, int k, uint64_t value) {
    const size_t at = static_cast<size_t>(token) * args.format.topk + k;
    store_weight(args.y_values + at * args.format.weight_bytes, value, args.format.weight_bytes);
}

// Finds the rank of each of a token's choices; -1: none.
template <WarpLike W>
EP_FN void find_ranks_of(W& warp, const LowLatencyCombineArgs& args, int token,
                         PerLane<W, int>& rank) {
    warp.lanes(args.format.topk, [&](int k) {
        const int expert = args.layout.experts(token)[k];
        rank[k] = expert < 0 ? -1 : expert / args.heap.local_experts();
    });
}

// Stores a tag of this call where a rank looks that expects the other kind of sum: it fails with a
// mismatch then, instead of waiting in vain.
template <WarpLike W, class F>
EP_FN void tag_other_kind(W& warp, const LowLatencyCombine<F>& call, int source, int token,
                          int last_k) {
    if constexpr (F::kKeepsLines) {
        const LowLatencyHeap& heap = call.heap();
        const int rank = call.args.rank;
        const size_t tag = call.args.sum_at_expert
                               ? heap.part(call.bank, rank, token, last_k, 0) + Piece::tag(0)
                               : heap.sum(call.bank, rank, token, last_k) + Line::kTag;
        warp.lanes(heap.lines && !heap.sums_at_expert ? 1 : 0, [&](int) {
            W::store_word(call.fabric.template at<uint64_t>(source, tag), call.tag);
        });
    }
}

// Calls f(source, token, share) for a warp's share of the rows that go back to all ranks but
// `kept`. Each rank begins with the next rank and ends with itself, so that not all ranks' rows
// pass through one link at once.
template <class Shares, WarpLike W, class F, class Return>
EP_FN bool for_returned(W& warp, const LowLatencyCombine<F>& call, const Team& team, int kept,
                        Return&& f) {
    const LowLatencyCombineArgs& args = call.args;
    return for_own_shares<Shares>(
        warp, args, team, args.rank + 1,
        [&](int lanes, const auto& source, const auto& token, auto& bits) {
            warp.lanes(lanes, [&](int lane) {
                const int word = source[lane] * args.heap.chunks() + token[lane] / 32;
                const bool returns =
                    source[lane] != kept && call.takes_part(LowLatencyHalf::Send, source[lane]);
                bits[lane] = returns ? args.layout.present(word) : 0;
            });
            return true;
        },
        f);
}

}  // namespace ep
