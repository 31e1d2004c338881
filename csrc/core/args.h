#pragma once

#include <cstdint>

#include "core/heap.h"
#include "core/layout.h"
#include "core/row.h"
#include "core/sends.h"
#include "core/topology.h"

namespace ep {

// Arguments of the normal mode's kernels, the same for every backend.

// What is counted, and how.
struct CountArgs {
    const void* topk_idx;  // [T, K], int32 or int64
    int index_bytes;       // 4 or 8
    int expert_alignment;  // rows of an expert are padded to a multiple of this
    int expert_capacity;   // > 0: every expert gets exactly this many rows
    // [2, L], padding included: row 0 is for the caller, row 1 for the handle.
    int64_t* tokens_per_expert;
    bool allows_repeats = false;  // a token may name an expert twice; flat rows only
};

struct NotifyArgs : CountArgs {
    int rank;
    Heap heap;
    Layout layout;
    uint64_t epoch;  // number of this notify on this buffer, from 1
    Layout::Report report{};

    // Number of the layout made here: never 0, which marks a layout that was not made, and
    // different from those of nearby notifies.
    EP_HD uint32_t layout_epoch() const {
        const auto low = static_cast<uint32_t>(epoch);
        return low ? low : uint32_t{1} << 31;
    }
    EP_HD void set_expert_rows(int expert, int rows) const {
        tokens_per_expert[expert] = tokens_per_expert[layout.local_experts() + expert] = rows;
    }
};

// Arguments that dispatch and combine share.
struct TransferArgs {
    int rank;
    Heap heap;
    Layout layout;
    RowFormat format;
    uint64_t call;          // number of this dispatch or combine on this buffer, from 1
    int nvl_batch;          // rows after which an NVLink ring's flag is published
    int rdma_chunk;         // rows after which a network ring's flag is signalled
    int32_t* dst_rows;      // [received rows, K]: output row for each k, kElsewhere or kOverflowed
    int32_t* rail_experts;  // [rail rows, K]: expert ids of the forwarded rows
    int64_t max_received;   // rows that `dst_rows` can hold
    int64_t max_rail;       // rows that `rail_experts` can hold
    int64_t max_rows;       // rows that the expert-grouped tensor can hold
    bool is_combine = false;
    bool is_weighted = false;   // a combine that multiplies rows
    bool fills_tables = false;  // dispatch that makes the handle
    // Flat layout: rows lie in order of arrival, once each for any number of experts, with K
    // weights each. A dispatch that fills tables stores the local experts in `dst_rows`.
    bool is_flat = false;
    uint32_t resets_since_made = 0;  // of the handle

    static constexpr int32_t kElsewhere = -1;   // that expert lives on another rank
    static constexpr int32_t kOverflowed = -2;  // the expert-grouped tensor had no room

    EP_HD Sends::Kind kind() const {
        if (is_weighted) return Sends::Kind::WeightedCombine;
        if (layout.is_planned)
            return is_combine ? Sends::Kind::PlannedCombine : Sends::Kind::PlannedDispatch;
        if (is_combine) return Sends::Kind::Combine;
        return is_flat ? Sends::Kind::FlatDispatch : Sends::Kind::Dispatch;
    }
    // Bytes of weights that belong to one row of this rank's experts.
    EP_HD int64_t row_weight_bytes() const {
        return static_cast<int64_t>(format.weight_bytes) * (is_flat ? format.topk : 1);
    }
    // Whether this kernel is the first of its call to wait for other ranks: no notify precedes it.
    EP_HD bool begins_call() const { return layout.is_planned || !fills_tables; }
    EP_HD const Topology& topology() const { return heap.topology; }
    EP_HD int node() const { return topology().node_of(rank); }
    EP_HD int local() const { return topology().local_of(rank); }
    // The other ranks, from the next one on. This rank's own rows pass through no NVLink ring.
    EP_HD int other_ranks() const { return topology().world() - 1; }
    EP_HD int other_rank(int i) const { return (rank + 1 + i) % topology().world(); }
    // The other nodes, from the next one on.
    EP_HD int other_nodes() const { return topology().nodes - 1; }
    EP_HD int other_node(int i) const { return (node() + 1 + i) % topology().nodes; }
    // The rank of this rank's rail on `node`.
    EP_HD int on_rail(int node) const { return topology().rank(node, local()); }
    // Returns i with other_node(i) == other; negative for this rank's node.
    EP_HD int place_of_node(int other) const {
        return other < node() ? other - node() - 1 + topology().nodes : other - node() - 1;
    }
    EP_HD uint64_t nvl_slots() const { return format.slots(heap.nvl_ring_bytes); }
    EP_HD uint64_t rdma_slots() const { return format.slots(heap.rdma_ring_bytes); }
    // Rows (or credits) per signal of a network ring. Both are held back until a chunk is full, so
    // two chunks, each one short of full, must leave room in the ring.
    EP_HD uint64_t chunk() const {
        const uint64_t half = rdma_slots() / 2 > 0 ? rdma_slots() / 2 : 1;
        return static_cast<uint64_t>(rdma_chunk) < half ? rdma_chunk : half;
    }
};

struct DispatchArgs : TransferArgs {
    const char* x;        // [T, payload_bytes]
    const char* scales;   // [T, scale_bytes]
    const char* weights;  // [T, K, weight_bytes]
    char* recv_x;         // [max_rows, payload_bytes]
    char* recv_scales;    // [max_rows, scale_bytes]
    char* recv_weights;   // [max_rows, weight_bytes]; flat: [max_rows, K, weight_bytes]
    // The exchange writes a row of another rank to its first output row only. The intra-rank pass
    // writes the other output rows, and this rank's own rows.
    bool has_intra_rank_pass = false;
    bool clears_end = true;        // zeros rows after the last expert's, not only their weights
    bool clears_padding = true;    // the same for each expert's padding
    bool has_all_weights = false;  // flat: keeps the weights of other ranks' experts, not 0
    // [max_received], index of each row's token on its source rank; null if not asked for.
    int32_t* source_tokens = nullptr;
    // Speculative launch: tensors are sized by a guess, before the host knows the counts. If it is
    // wrong, the kernel does nothing and the host launches the same call again.
    bool is_speculative = false;
    int64_t min_rows = 0;  // with fewer rows the guessed tensors would waste too much memory

    EP_HD bool fits(const Layout::Totals& totals) const {
        const int64_t rows = is_flat ? totals.received_rows : totals.expert_rows;
        return rows >= min_rows && rows <= max_rows && totals.received_rows <= max_received &&
               totals.rail_rows <= max_rail;
    }
};

// Fused notify and dispatch: dispatch exchanges the counts itself.
struct DispatchCallArgs : DispatchArgs, CountArgs {
    EP_HD NotifyArgs notify(uint64_t epoch) const { return {*this, rank, heap, layout, epoch}; }
};

struct CombineArgs : TransferArgs {
    const char* x;        // [max_rows, payload_bytes]
    const char* weights;  // [max_rows, weight_bytes]; flat: [max_rows, K, weight_bytes]
    char* y;              // [T, payload_bytes]
    char* y_weights;      // [T, K, weight_bytes]
    // [max_rows], Accumulator of x's type: factor of each row of x in the sum; null: none. Unlike
    // `weights`, which travel with the rows, they never leave the rank.
    const void* row_weights = nullptr;
    // [max_received, payload_bytes]: for each arrived row the sum over this rank's experts, made by
    // the intra-rank pass (see ExpertRows); null without that pass.
    char* sums = nullptr;
    // Warps of the intra-rank pass per source rank and channel: warp i % sum_warps sums row i.
    int sum_warps = 1;
    // [T, payload_bytes] each, added before all else; null: none. At most 32 - K of them.
    const char* bias[2] = {nullptr, nullptr};

    static constexpr int kMaxSumWarps = 2;
    static_assert(kMaxSumWarps == 2, "sum_warp_of and rows_of_sum_warp mask and shift");

    EP_HD int num_biases() const { return (bias[0] != nullptr) + (bias[1] != nullptr); }
    EP_HD int sum_warp_of(int row) const { return row & (sum_warps - 1); }
    // How many of the first `rows` rows warp `part` sums.
    EP_HD int rows_of_sum_warp(int part, int rows) const {
        return (rows - part + sum_warps - 1) >> (sum_warps - 1);
    }

    // Most combine receivers that a channel may have. ring_rows: slots of the smallest ring that
    // they read. A row keeps its slot while it is summed, so with more than half as many receivers
    // as slots the producer would wait for them. At most six, because they take up and free slots
    // in turn: more would mostly wait for each other. tests/gpu/HISTORY.md has what several gain
    // over one; six was not measured against other numbers.
    static EP_HD int max_receivers(uint64_t ring_rows) {
        constexpr int kMaxReceivers = 6;
        const uint64_t half = ring_rows / 2;
        return half < 1 ? 1 : half < kMaxReceivers ? static_cast<int>(half) : kMaxReceivers;
    }
    EP_HD int max_receivers() const {
        const bool reads_network = topology().nodes > 1 && rdma_slots() < nvl_slots();
        return max_receivers(reads_network ? rdma_slots() : nvl_slots());
    }
};

// Whether a speculative launch guessed wrong and must do nothing. If the counts never became known
// (epoch 0) the call runs, to fill its outputs with what cannot pass for data.
EP_HD bool is_skipped(const DispatchArgs& args) {
    return args.is_speculative && args.layout.totals().epoch && !args.fits(args.layout.totals());
}
EP_HD bool is_skipped(const CombineArgs&) { return false; }

EP_HD bool has_intra_rank_pass(const DispatchArgs& args) { return args.has_intra_rank_pass; }
EP_HD bool has_intra_rank_pass(const CombineArgs& args) { return args.sums != nullptr; }

}  // namespace ep
