#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/function.h"
#include "core/row.h"
#include "core/topology.h"

namespace ep {

// What notify computes for one dispatch, as views into one int32 array that the handle owns. Only
// `data` and `is_planned` may be set later.
struct Layout {
    Topology topology;
    int num_tokens;
    int topk;
    int num_experts;
    int channels;
    int32_t* data;
    bool is_planned = false;  // made without a notify, from what all ranks know

    Layout() = default;
    Layout(const Topology& ranks, int tokens, int k, int experts, int num_channels, int32_t* first)
        : topology(ranks),
          num_tokens(tokens),
          topk(k),
          num_experts(experts),
          channels(num_channels),
          data(first),
          local_experts_(experts / ranks.world()) {
        size_t end = kTotals;
        auto part = [&](size_t count) { return std::exchange(end, end + count); };
        const size_t choices = static_cast<size_t>(num_tokens) * topk;
        experts_ = part(choices);
        index_ = part(choices);
        expert_counts_ = part(static_cast<size_t>(channels + 1) * num_experts);
        rank_tokens_ = part(static_cast<size_t>(channels) * world());
        node_tokens_ = part(static_cast<size_t>(channels) * topology.nodes);
        received_ = part(static_cast<size_t>(channels) * world());
        received_start_ = part(static_cast<size_t>(channels) * world());
        expert_base_ = part(num_experts);
        expert_count_ = part(local_experts());
        expert_start_ = part(local_experts() + 1);
        rail_ = part(static_cast<size_t>(channels) * topology.nodes);
        rail_start_ = part(static_cast<size_t>(channels) * topology.nodes);
        first_tokens_ = part(channels + 1);
        size_ = end;
    }

    EP_HD int world() const { return topology.world(); }
    EP_HD int local_experts() const { return local_experts_; }
    EP_HD size_t size() const { return size_; }

    // The tokens of this rank's channel c are [first_token(c), first_token(c + 1)), where
    // first_token(c) = (T * c + shift(rank)) / C. If T < C, the shift C * rank / W gives tokens of
    // different ranks different channels, so that different receivers serve them. A planned layout
    // stores the bounds instead: equal shares of the rows that leave the rank.
    EP_HD int first_token(int rank, int channel) const {
        return is_planned ? planned_first_token(channel) : even_first_token(rank, channel);
    }
    EP_HD int even_first_token(int rank, int channel) const {
        const uint64_t tokens = static_cast<uint64_t>(num_tokens) * channel + shift(rank);
        return static_cast<int>(quotient(tokens, channels));
    }

    // The channels that have tokens, in order. If T < C there are T, with one token each.
    struct UsedChannels {
        uint32_t channels, tokens, shift;

        EP_HD int count() const { return static_cast<int>(tokens < channels ? tokens : channels); }
        EP_HD int operator[](uint32_t i) const {
            if (tokens >= channels) return static_cast<int>(i);
            return static_cast<int>((channels * (i + 1) - shift + tokens - 1) / tokens) - 1;
        }
    };
    EP_HD UsedChannels used_channels(int rank) const {
        return {static_cast<uint32_t>(channels), static_cast<uint32_t>(num_tokens), shift(rank)};
    }

    struct Totals {
        int32_t received_rows;  // rows that arrive here, each for one or more local experts
        int32_t expert_rows;    // rows of the expert-grouped output, padding included
        int32_t rail_rows;      // rows of other nodes that pass through this rank
        int32_t bad_token;      // 1 + the token whose ids are invalid (0: none)
        int32_t overflow;       // set when rows did not fit into the output
        uint32_t epoch;         // number of the notify that made this layout
        uint64_t ticket;        // in a copy for the host: which call it is from; else 0
    };
    // Where a kernel reports totals to a host that waits for them, and the ticket that marks them
    // as those of this call. totals: host memory, or null if the host does not wait.
    struct Report {
        Totals* totals = nullptr;
        uint64_t ticket = 0;
    };
    EP_HD Totals& totals() const { return *reinterpret_cast<Totals*>(data); }

    // --- this rank's tokens ---
    // experts [T, K]: expert ids; -1: none
    EP_HD int32_t* experts(int token) const {
        return data + experts_ + static_cast<size_t>(token) * topk;
    }
    // index [T, K]: how many earlier rows of this rank go to the same expert
    EP_HD int32_t* index(int token) const {
        return data + index_ + static_cast<size_t>(token) * topk;
    }
    // expert_counts [C + 1, E]: rows in earlier channels; row C: in all channels
    EP_HD int32_t* expert_counts(int channel) const {
        return data + expert_counts_ + static_cast<size_t>(channel) * num_experts;
    }
    // rank_tokens [C, W]: tokens for each rank
    EP_HD int32_t& rank_tokens(int channel, int rank) const {
        return data[rank_tokens_ + channel * world() + rank];
    }
    // node_tokens [C, N]: tokens for each node
    EP_HD int32_t& node_tokens(int channel, int node) const {
        return data[node_tokens_ + channel * topology.nodes + node];
    }

    // --- rows that this rank receives; the source rank names the ring ---
    // received [C, W]: rows from each rank
    EP_HD int32_t& received(int channel, int rank) const {
        return data[received_ + channel * world() + rank];
    }
    // received_start [C, W]: rows that come before those, ordered by rank and channel
    EP_HD int32_t& received_start(int channel, int rank) const {
        return data[received_start_ + channel * world() + rank];
    }
    // expert_base [W, L]: where a source rank's rows begin at each expert
    EP_HD int32_t* expert_base(int rank) const {
        return data + expert_base_ + rank * local_experts();
    }
    // expert_count [L]: rows, without padding
    EP_HD int32_t& expert_count(int expert) const { return data[expert_count_ + expert]; }
    // expert_start [L + 1]: where an expert's rows begin, with padding
    EP_HD int32_t& expert_start(int expert) const { return data[expert_start_ + expert]; }

    // --- rows that this rank forwards along its rail ---
    // rail [C, N]: rows from each node
    EP_HD int32_t& rail(int channel, int node) const {
        return data[rail_ + channel * topology.nodes + node];
    }
    // rail_start [C, N]: rows that come before those, ordered by node and channel
    EP_HD int32_t& rail_start(int channel, int node) const {
        return data[rail_start_ + channel * topology.nodes + node];
    }

    EP_HD int64_t rail_end(int channel, int node) const {
        return static_cast<int64_t>(rail_start(channel, node)) + rail(channel, node);
    }

    // planned_first_token [C + 1]: where each channel's tokens begin; planned layouts only
    EP_HD int32_t& planned_first_token(int channel) const { return data[first_tokens_ + channel]; }

    static constexpr size_t kTotals = sizeof(Totals) / sizeof(int32_t);

  private:
    EP_HD uint32_t shift(int rank) const {
        return static_cast<uint32_t>(channels) * rank / world();
    }

    int local_experts_;
    // Offsets of the parts, precomputed because kernels need them for every row.
    size_t experts_, index_, expert_counts_, rank_tokens_, node_tokens_, received_, received_start_,
        expert_base_, expert_count_, expert_start_, rail_, rail_start_, first_tokens_, size_;
};

}  // namespace ep
