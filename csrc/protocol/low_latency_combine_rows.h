#pragma once

#include "protocol/low_latency_halves.h"

namespace ep {

// What a low-latency combine sums and moves, whether its rows are lines or not.

// What the sums of T multiply rows by; `at` counts them.
template <class T>
EP_FN Accumulator<T> weight_at(const void* weights, int64_t at) {
    return static_cast<const Accumulator<T>*>(weights)[at];
}

// A row of the experts' and the value beside it. Negative: it had no room, so both are 0.
EP_FN const char* row_of(const LowLatencyCombineArgs& args, int64_t dst_row) {
    return dst_row < 0 ? nullptr : args.x + dst_row * args.format.payload_bytes;
}
EP_FN uint64_t value_of(const LowLatencyCombineArgs& args, int64_t dst_row) {
    const int bytes = args.format.weight_bytes;
    return dst_row < 0 ? 0 : load_weight(args.values + dst_row * bytes, bytes);
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

}  // namespace ep
