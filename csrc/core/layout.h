#pragma once

#include <cstddef>
#include <cstdint>

#include "core/function.h"
#include "core/topology.h"

namespace ep {

// What notify learns about one dispatch, as views into one int32 array that the handle owns.
struct Layout {
    Topology topology;
    int num_tokens;
    int topk;
    int num_experts;
    int channels;
    int32_t* data;

    EP_HD int world() const { return topology.world(); }
    EP_HD int local_experts() const { return num_experts / topology.world(); }

    // Tokens of a channel: [first_token(c), first_token(c + 1)).
    EP_HD int first_token(int channel) const { return static_cast<int64_t>(num_tokens) * channel / channels; }

    struct Totals {
        int32_t received_rows;  // rows that arrive here, each for one or more local experts
        int32_t expert_rows;    // rows of the expert-grouped output, padding included
        int32_t rail_rows;      // rows of other nodes that pass through this rank
        int32_t bad_token;      // 1 + the token whose ids are invalid (0: none)
        int32_t overflow;       // set when rows did not fit into the output
        uint32_t epoch;         // of the notify that made this layout
        int32_t unused[2];
    };
    EP_HD Totals& totals() const { return *reinterpret_cast<Totals*>(data); }

    // --- of this rank's own tokens ---
    EP_HD int32_t* experts(int token) const {
        return data + kTotals + static_cast<size_t>(token) * topk;
    }  // [T, K], -1: none
    EP_HD int32_t* index(int token) const { return experts(num_tokens) + static_cast<size_t>(token) * topk; }  // [T, K]
    EP_HD int32_t* expert_counts(int channel) const {
        return index(num_tokens) + static_cast<size_t>(channel) * num_experts;
    }  // [C + 1, E]
    EP_HD int32_t& rank_tokens(int channel, int rank) const {
        return expert_counts(channels + 1)[channel * world() + rank];
    }  // [C, W]
    EP_HD int32_t& node_tokens(int channel, int node) const {  // [C, N]
        return (&rank_tokens(channels, 0))[channel * topology.nodes + node];
    }

    // --- of the rows that this rank receives; the source rank names the ring ---
    EP_HD int32_t& received(int channel, int rank) const {
        return (&node_tokens(channels, 0))[channel * world() + rank];
    }  // [C, W]
    EP_HD int32_t& received_start(int channel, int rank) const {
        return (&received(channels, 0))[channel * world() + rank];
    }  // [C, W]
    EP_HD int32_t* expert_base(int rank) const {
        return &received_start(channels, 0) + static_cast<size_t>(rank) * local_experts();
    }  // [W, L]
    EP_HD int32_t& expert_count(int expert) const { return expert_base(world())[expert]; }  // [L], without padding
    EP_HD int32_t& expert_start(int expert) const {
        return (&expert_count(local_experts()))[expert];
    }  // [L + 1], with padding

    // --- of the rows that this rank forwards along its rail ---
    EP_HD int32_t& rail(int channel, int node) const {
        return (&expert_start(local_experts() + 1))[channel * topology.nodes + node];
    }  // [C, N]
    EP_HD int32_t& rail_start(int channel, int node) const {
        return (&rail(channels, 0))[channel * topology.nodes + node];
    }  // [C, N]

    EP_HD size_t size() const { return &rail_start(channels, 0) - data; }

    static constexpr size_t kTotals = sizeof(Totals) / sizeof(int32_t);
};

}  // namespace ep
