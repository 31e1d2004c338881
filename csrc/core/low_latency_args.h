// Arguments and layout of the low-latency mode's kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/float8.h"
#include "core/layout.h"
#include "core/low_latency_heap.h"
#include "core/pieces.h"
#include "core/row.h"

namespace ep {

// What a low-latency dispatch computes, as views into one int32 array that the handle owns.
struct LowLatencyLayout {
    int world;
    int local_experts;
    int chunks;
    int topk;
    int max_tokens;
    int32_t* data;

    LowLatencyLayout() = default;
    LowLatencyLayout(const LowLatencyHeap& heap, int k, int warps, int32_t* first)
        : world(heap.topology.world()),
          local_experts(heap.local_experts()),
          chunks(heap.chunks()),
          topk(k),
          max_tokens(heap.max_tokens),
          data(first) {
        size_t end = kOverflow + 1;
        auto part = [&](size_t count) { return std::exchange(end, end + count); };
        counts_ = part(local_experts);
        starts_ = part(local_experts + 1);
        experts_ = part(static_cast<size_t>(max_tokens) * topk);
        present_ = part(static_cast<size_t>(world) * chunks);
        dst_rows_ = part(static_cast<size_t>(world) * max_tokens * topk);
        active_ = part(world);
        scratch_ = part(static_cast<size_t>(warps) * local_experts);
        size_ = end;
    }

    static constexpr size_t kOverflow = 0;

    EP_HD size_t size() const { return size_; }
    // overflow: 1 if rows did not fit, else 0
    EP_HD int32_t& overflow() const { return data[kOverflow]; }
    // count [L]: rows, without padding
    EP_HD int32_t& count(int expert) const { return data[counts_ + expert]; }
    // start [L + 1]: where an expert's rows begin
    EP_HD int32_t& start(int expert) const { return data[starts_ + expert]; }
    // experts [T, K]: ids of this rank's tokens; -1: none, -2 - id: its rank is masked
    EP_HD int32_t* experts(int token) const {
        return data + experts_ + static_cast<size_t>(token) * topk;
    }
    // present [W, chunks]: bits of the tokens that arrived, 32 per word
    EP_HD uint32_t& present(int word) const {
        return reinterpret_cast<uint32_t*>(data)[present_ + word];
    }
    // dst_rows [W, max_tokens, K]: output row for each k of an arrived token
    EP_HD int32_t* dst_rows(int rank, int token) const {
        return data + dst_rows_ + (static_cast<size_t>(rank) * max_tokens + token) * topk;
    }
    // active [W]: with masking, whether the dispatch sent to a rank and received from it
    EP_HD int32_t& active(int rank) const { return data[active_ + rank]; }
    // scratch [warps, L]: each warp's copy of where experts' rows begin
    EP_HD int32_t* scratch(int warp) const {
        return data + scratch_ + static_cast<size_t>(warp) * local_experts;
    }

  private:
    size_t counts_, starts_, experts_, present_, dst_rows_, active_, scratch_, size_;
};

// The reason that a rank gives another one when it masks it.
enum class MaskReason : uint64_t {
    None,
    Asked,   // a caller wrote to active_ranks: both go on, without each other
    Silent,  // it waited for the other in vain and takes it for dead: the other must end
};

// Why a rank has masked another, for its host to read at any time.
struct MaskedRank {
    static constexpr uint64_t kAsked = 1, kWaited = 2;

    uint64_t state;  // 0: not masked; kAsked; or kWaited + what it waited for (Wait)
    uint64_t waited_ns;
};

// How calls go on without ranks that stay away. Only if the heap has masking.
struct LowLatencyMask {
    int32_t* active;    // [W], the caller's: 0 masks a rank for good, or says that it is masked
    MaskedRank* shown;  // [W], which ranks are masked, for the host to read at any time
    uint64_t* dropped;  // [2], choices lost to masked ranks: in dispatches, in combines
    const int32_t* required;  // [W] or null: a rank that has 1 here must not be masked
    uint64_t slice_ns;        // interval between two heartbeats of a waiting rank
    int silent_slices;        // intervals without a heartbeat after which a rank is masked
    int max_slices;           // intervals after which any missing rank is masked
};

// Arguments of both halves of both kinds of call. They include no call number, because a captured
// launch can be replayed.
struct LowLatencyArgs {
    int rank;
    LowLatencyHeap heap;
    LowLatencyLayout layout;
    RowFormat format;
    int num_tokens;
    uint64_t* call;    // the call's number: written by its sending half, read by its receiving half
    int64_t max_rows;  // rows of the expert-grouped tensor
    // [W], the caller's, or null: a receiving half adds how long it waited for each rank.
    int64_t* recv_wait_ns;
    LowLatencyMask mask;
    // Number of the dispatch whose layout this call of the normal API uses, which ranks must agree
    // on; null: the call makes a layout, or is of the low-latency mode.
    const uint64_t* layout_call = nullptr;
    static constexpr uint64_t kGivenUp = ~uint64_t{0};  // *layout_call, of a dispatch that failed
    uint32_t resets_since_made = 0;                     // resets since the layout was made
    // With lines: one row per token that arrives, in the order of (source rank, token), instead of
    // one for each of its experts here. Its weights are then [max_rows, K].
    bool is_flat = false;

    static constexpr int32_t kElsewhere = -1;   // that expert lives on another rank
    static constexpr int32_t kOverflowed = -2;  // the expert-grouped tensor had no room
    static constexpr int32_t kDropped = -2;     // minus the id of an expert whose rank is masked
    static constexpr int32_t kSameRow = -3;     // flat: a later choice of the token names its row

    // Weights of a row that arrives.
    EP_HD size_t weights_per_row() const { return is_flat ? format.topk : 1; }
};

// What the rows of a dispatch are: kernels have an instance for each. Quantized: bf16 that becomes
// fp8 on the way. Flat: see LowLatencyArgs::is_flat.
enum class RowKind { Grouped, Quantized, Flat };
template <class F>
decltype(auto) with_row_kind(RowKind kind, F&& f) {
    switch (kind) {
        case RowKind::Quantized:
            return f.template operator()<RowKind::Quantized>();
        case RowKind::Flat:
            return f.template operator()<RowKind::Flat>();
        default:
            return f.template operator()<RowKind::Grouped>();
    }
}

struct LowLatencyDispatchArgs : LowLatencyArgs {
    static constexpr LowLatencyKind kKind = LowLatencyKind::Dispatch;

    const void* topk_idx;  // [T, K], int32 or int64
    int index_bytes;       // 4 or 8
    int expert_alignment;  // rows of an expert are padded to a multiple of this
    int64_t expert_rows;   // > 0: every expert has this many rows and begins at a multiple
    const char* x;         // [T, payload_bytes], or bf16 to be quantized to fp8
    const char* scales;    // [T, scale_bytes]
    const char* weights;   // [T, K, weight_bytes]
    char* recv_x;          // [max_rows, payload_bytes]
    char* recv_scales;     // [max_rows, scale_bytes], or by columns
    char* recv_weights;    // [max_rows, weight_bytes]
    ScaleFormat quantize = ScaleFormat::None;  // scale format if x is quantized
    // > 0: recv_scales is [max_rows / expert_rows, words, scale_column] (one matrix if expert_rows
    // is 0): each 4-byte word of a row's scales has its own column.
    int64_t scale_column = 0;
    // [W], the caller's, or null: the number of rows from each rank is added to it.
    int64_t* recv_rows = nullptr;
    // > 0: only this many tokens keep rows, the first in the order of (rank, token); max_rows
    // without expert_rows.
    int64_t max_received = 0;
    // Zeros recv_weights of rows that no token fills, and sets their recv_experts to -1.
    bool clears_weights = false;
    // [max_rows, K] or null, flat: local experts of each row, or -1
    int32_t* recv_experts = nullptr;
    // [2, L] or null, padding included: row 0 is for the caller, row 1 for the handle.
    int64_t* tokens_per_expert = nullptr;
    // The host waits for the number of rows: Totals::expert_rows of `report`, which the launch
    // sets.
    bool host_waits = false;
    Layout::Report report{};

    static constexpr Sends::Mode kMode = Sends::Mode::LowLatencyDispatch;
    EP_HD Sends::Kind kind() const { return Sends::Kind::Dispatch; }
    EP_HD bool by_lines() const { return heap.lines; }
    EP_HD RowKind row_kind() const {
        if (quantize != ScaleFormat::None) return RowKind::Quantized;
        return is_flat ? RowKind::Flat : RowKind::Grouped;
    }
    EP_HD uint64_t shape() const { return 0; }
    EP_HD int64_t scale_words() const { return format.scale_bytes / 4; }
    // Index in recv_scales of the first word of a row's scales.
    EP_HD size_t scale_word(uint32_t row) const {
        if (!expert_rows) return row;
        const auto rows = static_cast<uint32_t>(expert_rows);
        return row / rows * scale_words() * scale_column + row % rows;
    }
    EP_HD void set_expert_rows(int expert, int64_t rows) const {
        if (!tokens_per_expert) return;
        tokens_per_expert[expert] = tokens_per_expert[heap.local_experts() + expert] = rows;
    }
    EP_HD size_t recv_scale_bytes() const {
        if (!scale_column) return static_cast<size_t>(max_rows) * format.scale_bytes;
        const size_t matrices = expert_rows ? max_rows / expert_rows : 1;
        return matrices * scale_words() * scale_column * 4;
    }
};

struct LowLatencyCombineArgs : LowLatencyArgs {
    static constexpr LowLatencyKind kKind = LowLatencyKind::Combine;

    const char* x;       // [max_rows, payload_bytes]
    const char* values;  // [max_rows, weight_bytes], flat [max_rows, K, ...]: travel with the rows
    char* y;             // [T, payload_bytes]
    char* y_values;      // [T, K, weight_bytes]
    bool sum_at_expert;  // a rank sums its experts' rows of a token; one row travels
    // Accumulator of x's type; null: none. Factors of rows that are summed at the expert,
    // [max_rows], or at the token's rank, [T, K].
    const void* row_weights;
    const void* token_weights;
    bool renormalize;  // token_weights of the remaining choices make up for the others

    // One row per rank and token is few bytes, so latency decides and lines are faster. They move
    // more bytes, which would cost more with one row per choice.
    EP_HD bool by_lines() const { return heap.lines && sum_at_expert; }

    static constexpr Sends::Mode kMode = Sends::Mode::LowLatencyCombine;
    EP_HD bool is_weighted() const { return layout_call && row_weights; }
    EP_HD Sends::Kind kind() const {
        if (layout_call) return is_weighted() ? Sends::Kind::WeightedCombine : Sends::Kind::Combine;
        return sum_at_expert ? Sends::Kind::CombineAtExpert : Sends::Kind::Combine;
    }
    EP_HD uint64_t shape() const { return 1 + sum_at_expert + 2 * is_weighted(); }
};

}  // namespace ep
