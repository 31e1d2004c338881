#pragma once

#include <cstdint>

#include "bindings/members.h"
#include "core/args.h"

namespace ep {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Where the tensors of one rank are; 0: none.
struct RankTensors {
    Address layout = 0;
    int num_tokens = 0;
    Address topk_idx = 0, tokens_per_expert = 0;       // notify reads, and writes
    Address x = 0, scales = 0, weights = 0;            // what the call reads
    Address out = 0, out_scales = 0, out_weights = 0;  // what it writes
    Address dst_rows = 0, rail_experts = 0;
    int64_t max_received = 0, max_rail = 0, max_rows = 0;
    uint32_t handle_age = 0;  // see TransferArgs
    bool is_flat = false;     // see TransferArgs
    bool is_planned = false;  // see Layout
    // dispatch, see DispatchArgs
    bool fills_tables = false;  // the first with its layout
    bool has_intra_rank_pass = false, clears_end = true, has_all_weights = false;
    Address source_tokens = 0;
    bool is_ahead = false;
    int64_t min_rows = 0;
    // combine, see CombineArgs
    bool is_weighted = false;
    Address row_weights = 0, sums = 0, bias = 0, second_bias = 0;
};

inline const Members<RankTensors>& members_of(RankTensors*) {
    static const Members<RankTensors> members{
        {"layout", set_member<&RankTensors::layout>},
        {"num_tokens", set_member<&RankTensors::num_tokens>},
        {"topk_idx", set_member<&RankTensors::topk_idx>},
        {"tokens_per_expert", set_member<&RankTensors::tokens_per_expert>},
        {"x", set_member<&RankTensors::x>},
        {"scales", set_member<&RankTensors::scales>},
        {"weights", set_member<&RankTensors::weights>},
        {"out", set_member<&RankTensors::out>},
        {"out_scales", set_member<&RankTensors::out_scales>},
        {"out_weights", set_member<&RankTensors::out_weights>},
        {"row_weights", set_member<&RankTensors::row_weights>},
        {"dst_rows", set_member<&RankTensors::dst_rows>},
        {"rail_experts", set_member<&RankTensors::rail_experts>},
        {"max_received", set_member<&RankTensors::max_received>},
        {"max_rail", set_member<&RankTensors::max_rail>},
        {"max_rows", set_member<&RankTensors::max_rows>},
        {"fills_tables", set_member<&RankTensors::fills_tables>},
        {"has_intra_rank_pass", set_member<&RankTensors::has_intra_rank_pass>},
        {"clears_end", set_member<&RankTensors::clears_end>},
        {"sums", set_member<&RankTensors::sums>},
        {"is_weighted", set_member<&RankTensors::is_weighted>},
        {"handle_age", set_member<&RankTensors::handle_age>},
        {"is_flat", set_member<&RankTensors::is_flat>},
        {"has_all_weights", set_member<&RankTensors::has_all_weights>},
        {"source_tokens", set_member<&RankTensors::source_tokens>},
        {"is_ahead", set_member<&RankTensors::is_ahead>},
        {"min_rows", set_member<&RankTensors::min_rows>},
        {"bias", set_member<&RankTensors::bias>},
        {"second_bias", set_member<&RankTensors::second_bias>},
        {"is_planned", set_member<&RankTensors::is_planned>},
    };
    return members;
}

inline Layout layout_of(const Heap& heap, const RankTensors& t, int topk) {
    Layout layout = {heap.topology,    t.num_tokens,  topk,
                     heap.num_experts, heap.channels, at<int32_t>(t.layout)};
    layout.is_planned = t.is_planned;
    return layout;
}

inline TransferArgs transfer_args(const Heap& heap, int rank, const RankTensors& t,
                                  const RowFormat& format, uint64_t call, int nvl_batch,
                                  int rdma_chunk) {
    TransferArgs args = {rank,
                         heap,
                         layout_of(heap, t, format.topk),
                         format,
                         call,
                         nvl_batch,
                         rdma_chunk,
                         at<int32_t>(t.dst_rows),
                         at<int32_t>(t.rail_experts),
                         t.max_received,
                         t.max_rail,
                         t.max_rows};
    args.handle_age = t.handle_age;
    args.is_flat = t.is_flat;
    return args;
}

inline DispatchArgs dispatch_args(const Heap& heap, int rank, const RankTensors& t,
                                  const RowFormat& format, uint64_t call, int nvl_batch,
                                  int rdma_chunk) {
    TransferArgs args = transfer_args(heap, rank, t, format, call, nvl_batch, rdma_chunk);
    args.fills_tables = t.fills_tables;
    return {args,
            at<char>(t.x),
            at<char>(t.scales),
            at<char>(t.weights),
            at<char>(t.out),
            at<char>(t.out_scales),
            at<char>(t.out_weights),
            t.has_intra_rank_pass,
            t.clears_end,
            t.has_all_weights,
            at<int32_t>(t.source_tokens),
            t.is_ahead,
            t.min_rows};
}

inline CombineArgs combine_args(const Heap& heap, int rank, const RankTensors& t,
                                const RowFormat& format, uint64_t call, int nvl_batch,
                                int rdma_chunk) {
    TransferArgs args = transfer_args(heap, rank, t, format, call, nvl_batch, rdma_chunk);
    args.is_combine = true;
    args.is_weighted = t.is_weighted;
    CombineArgs combine = {args,
                           at<char>(t.x),
                           at<char>(t.weights),
                           at<char>(t.out),
                           at<char>(t.out_weights),
                           at<void>(t.row_weights),
                           at<char>(t.sums)};
    combine.bias[0] = at<char>(t.bias);
    combine.bias[1] = at<char>(t.second_bias);
    return combine;
}

}  // namespace ep
