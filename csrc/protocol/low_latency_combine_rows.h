#pragma once

#include "protocol/low_latency_halves.h"

namespace ep {

// What a low-latency combine sums and moves, as lines or not.

// What the sums of T multiply rows by; `at` counts them.
template <class T>
EP_FN Accumulator<T> weight_at(const void* weights, int64_t at) {
    return static_cast<const Accumulator<T>*>(weights)[at];
}

// A row of the experts' and the value beside it, which is 0 of a row that had no room.
EP_FN const char* row_of(const LowLatencyCombineArgs& args, int64_t dst_row) {
    return args.x + dst_row * args.format.payload_bytes;
}
EP_FN uint64_t value_of(const LowLatencyCombineArgs& args, int64_t dst_row) {
    const int bytes = args.format.weight_bytes;
    return dst_row < 0 ? 0 : load_weight(args.values + dst_row * bytes, bytes);
}

// What came back beside a token's k-th row.
EP_FN void store_value(const LowLatencyCombineArgs& args, int token, int k, uint64_t value) {
    const size_t at = static_cast<size_t>(token) * args.format.topk + k;
    store_weight(args.y_values + at * args.format.weight_bytes, value, args.format.weight_bytes);
}

// For each of a token's choices the rank that it went to; -1: none.
template <WarpLike W>
EP_FN void find_ranks_of(W& warp, const LowLatencyCombineArgs& args, int token,
                         typename W::template PerLane<int>& rank) {
    warp.lanes(args.format.topk, [&](int k) {
        const int expert = args.layout.experts(token)[k];
        rank[k] = expert < 0 ? -1 : expert / args.heap.local_experts();
    });
}

// A rank that expects the other kind of sum looks for its tags elsewhere, and would wait in vain:
// it finds one of this call there, which it does not take for its own.
template <WarpLike W, class F>
EP_FN void tell_other_kind(W& warp, const LowLatencyCombine<F>& call, int source, int token,
                           int last_k) {
    if constexpr (F::kKeepsLines) {
        const LowLatencyHeap& heap = call.heap();
        const int rank = call.args.rank;
        const size_t tag = call.args.sum_at_expert
                               ? heap.part(call.bank, rank, token, last_k, 0) + Piece::tag(0)
                               : heap.sum(call.bank, rank, token, last_k) + Line::kTag;
        warp.lanes(heap.lines ? 1 : 0, [&](int) {
            W::store_word(call.fabric.template at<uint64_t>(source, tag), call.tag);
        });
    }
}

// f(source, token, share) for a warp's share of the rows that go back to other ranks, and to this
// one, unless they are kept. Each rank begins with another one and ends with itself: no link
// carries the rows of all.
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
