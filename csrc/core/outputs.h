#pragma once

#include <cstddef>
#include <cstdint>

#include "core/args.h"
#include "core/function.h"
#include "core/low_latency_args.h"

namespace ep {

// What a dispatch or combine of one rank writes for its caller. If the call is given up, all of it
// is filled with kPoison, which cannot pass for data: NaN in every float type (also e8m0), -1 in
// integer types.
struct Outputs {
    static constexpr uint8_t kPoison = 0xff;
    static constexpr int kParts = 7;

    struct Part {
        char* data;
        size_t bytes;
    };
    Part parts[kParts];
    uint32_t* epoch;  // null, or that of the layout that the call fills: set to 0, so that no call
                      // uses it
};

EP_HD Outputs outputs_of(const DispatchArgs& args) {
    const size_t rows = args.max_rows;
    // the caller reads these of flat rows
    const Outputs::Part dst_rows{reinterpret_cast<char*>(args.dst_rows),
                                 args.max_received * args.format.topk * sizeof(int32_t)};
    return {{{args.recv_x, rows * args.format.payload_bytes},
             {args.recv_scales, rows * args.format.scale_bytes},
             {args.recv_weights, rows * args.row_weight_bytes()},
             args.is_flat && args.fills_tables ? dst_rows : Outputs::Part{nullptr, 0}},
            args.fills_tables ? &args.layout.totals().epoch : nullptr};
}

EP_HD Outputs outputs_of(const CombineArgs& args) {
    const size_t tokens = args.layout.num_tokens;
    return {{{args.y, tokens * args.format.payload_bytes},
             {args.y_weights, tokens * args.format.topk * args.format.weight_bytes}},
            nullptr};
}

// Includes the layout, because computations on the rows read its counts and output rows, and the
// call's number, by which later calls with the layout know that it is none
// (LowLatencyArgs::kGivenUp).
EP_HD Outputs outputs_of(const LowLatencyDispatchArgs& args) {
    const size_t rows = args.max_rows;
    // A host that waits has taken the counts before, or takes none, and its memory may be gone.
    const bool has_counts = args.tokens_per_expert && !args.host_waits;
    const size_t counts = has_counts ? 2 * args.heap.local_experts() : 0;
    return {{{args.recv_x, rows * args.format.payload_bytes},
             {args.recv_scales, args.recv_scale_bytes()},
             {args.recv_weights, rows * args.weights_per_row() * args.format.weight_bytes},
             {reinterpret_cast<char*>(args.layout.data), args.layout.size() * sizeof(int32_t)},
             {reinterpret_cast<char*>(args.call), sizeof(*args.call)},
             {reinterpret_cast<char*>(args.tokens_per_expert), counts * sizeof(int64_t)},
             {reinterpret_cast<char*>(args.recv_experts),
              args.recv_experts ? rows * args.format.topk * sizeof(int32_t) : 0}},
            nullptr};
}

EP_HD Outputs outputs_of(const LowLatencyCombineArgs& args) {
    const size_t tokens = args.num_tokens;
    return {{{args.y, tokens * args.format.payload_bytes},
             {args.y_values, tokens * args.format.topk * args.format.weight_bytes}},
            nullptr};
}

}  // namespace ep
