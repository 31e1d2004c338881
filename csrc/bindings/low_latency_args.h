#pragma once

#include <vector>

#include "bindings/launch_args.h"
#include "bindings/members.h"
#include "core/low_latency_args.h"

namespace ep {

// Where the tensors of one rank are; 0: none.
struct LowLatencyTensors {
    Address layout = 0, call = 0;
    int num_tokens = 0;
    int64_t max_rows = 0;
    Address topk_idx = 0;
    Address x = 0, scales = 0, weights = 0;                    // what the call reads
    Address out = 0, out_scales = 0, out_weights = 0;          // what it writes
    Address row_weights = 0, token_weights = 0;                // combine
    Address recv_wait_ns = 0, recv_rows = 0;                   // what the caller counts
    Address active = 0, shown = 0, dropped = 0, required = 0;  // with masking
};

inline const Members<LowLatencyTensors>& members_of(LowLatencyTensors*) {
    static const Members<LowLatencyTensors> members{
        {"layout", set_member<&LowLatencyTensors::layout>},
        {"call", set_member<&LowLatencyTensors::call>},
        {"num_tokens", set_member<&LowLatencyTensors::num_tokens>},
        {"max_rows", set_member<&LowLatencyTensors::max_rows>},
        {"topk_idx", set_member<&LowLatencyTensors::topk_idx>},
        {"x", set_member<&LowLatencyTensors::x>},
        {"scales", set_member<&LowLatencyTensors::scales>},
        {"weights", set_member<&LowLatencyTensors::weights>},
        {"out", set_member<&LowLatencyTensors::out>},
        {"out_scales", set_member<&LowLatencyTensors::out_scales>},
        {"out_weights", set_member<&LowLatencyTensors::out_weights>},
        {"row_weights", set_member<&LowLatencyTensors::row_weights>},
        {"token_weights", set_member<&LowLatencyTensors::token_weights>},
        {"recv_wait_ns", set_member<&LowLatencyTensors::recv_wait_ns>},
        {"recv_rows", set_member<&LowLatencyTensors::recv_rows>},
        {"active", set_member<&LowLatencyTensors::active>},
        {"shown", set_member<&LowLatencyTensors::shown>},
        {"dropped", set_member<&LowLatencyTensors::dropped>},
        {"required", set_member<&LowLatencyTensors::required>},
    };
    return members;
}

struct LowLatencyOptions {
    int index_bytes = 0;                       // dispatch
    int expert_alignment = 1;                  // dispatch
    int64_t expert_rows = 0;                   // dispatch
    ScaleFormat quantize = ScaleFormat::None;  // dispatch
    int64_t scale_column = 0;                  // dispatch
    bool sum_at_expert = false;                // combine
    bool renormalize = false;                  // combine
    uint64_t slice_ns = 0;                     // with masking, as the next two
    int silent_slices = 0;
    int max_slices = 0;
};

inline LowLatencyMask low_latency_mask(const LowLatencyTensors& t,
                                       const LowLatencyOptions& options) {
    return {at<int32_t>(t.active),   at<MaskedRank>(t.shown), at<uint64_t>(t.dropped),
            at<int32_t>(t.required), options.slice_ns,        options.silent_slices,
            options.max_slices};
}

inline LowLatencyArgs low_latency_args(const LowLatencyHeap& heap, int warps, int rank,
                                       const LowLatencyTensors& t, const RowFormat& format,
                                       const LowLatencyOptions& options) {
    return {rank,
            heap,
            LowLatencyLayout{heap, format.topk, warps, at<int32_t>(t.layout)},
            format,
            t.num_tokens,
            at<uint64_t>(t.call),
            t.max_rows,
            at<int64_t>(t.recv_wait_ns),
            low_latency_mask(t, options)};
}

inline LowLatencyDispatchArgs low_latency_dispatch_args(const LowLatencyHeap& heap, int warps,
                                                        int rank, const LowLatencyTensors& t,
                                                        const RowFormat& format,
                                                        const LowLatencyOptions& options) {
    return {low_latency_args(heap, warps, rank, t, format, options),
            at<void>(t.topk_idx),
            options.index_bytes,
            options.expert_alignment,
            options.expert_rows,
            at<char>(t.x),
            at<char>(t.scales),
            at<char>(t.weights),
            at<char>(t.out),
            at<char>(t.out_scales),
            at<char>(t.out_weights),
            options.quantize,
            options.scale_column,
            at<int64_t>(t.recv_rows)};
}

inline LowLatencyCombineArgs low_latency_combine_args(const LowLatencyHeap& heap, int warps,
                                                      int rank, const LowLatencyTensors& t,
                                                      const RowFormat& format,
                                                      const LowLatencyOptions& options) {
    return {low_latency_args(heap, warps, rank, t, format, options),
            at<char>(t.x),
            at<char>(t.weights),
            at<char>(t.out),
            at<char>(t.out_weights),
            options.sum_at_expert,
            at<void>(t.row_weights),
            at<void>(t.token_weights),
            options.renormalize};
}

// Those of all ranks of this process.
template <class Args>
std::vector<Args> args_of_ranks(Args (*make)(const LowLatencyHeap&, int, int,
                                             const LowLatencyTensors&, const RowFormat&,
                                             const LowLatencyOptions&),
                                const LowLatencyHeap& heap, int warps,
                                const std::vector<int>& ranks,
                                const std::vector<LowLatencyTensors>& tensors,
                                const RowFormat& format, const LowLatencyOptions& options) {
    std::vector<Args> args;
    for (size_t i = 0; i < tensors.size(); ++i)
        args.push_back(make(heap, warps, ranks[i], tensors[i], format, options));
    return args;
}

}  // namespace ep
