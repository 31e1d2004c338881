#pragma once

#include "core/args.h"
#include "exec/warp.h"
#include "protocol/count_tables.h"

namespace ep {

// The layout of one rank's own tokens, made without other ranks, in three steps. Each step needs
// the one before on all channels.

// How many tokens the lanes hold at once, with one lane for each (token, k).
template <WarpLike W>
EP_FN int tokens_at_once(const Layout& layout) {
    return layout.topk < W::kLanesAtOnce ? W::kLanesAtOnce / layout.topk : 1;
}

// Calls f(token, lanes, value) for groups of successive tokens of a channel; `token` is the first.
// value[lane] is read(i), where i is the index of the lane's (token, k) in [T, K]. The values of
// the next group are read while f runs.
template <class T, WarpLike W, class Read, class F>
EP_FN void for_some_tokens(W& warp, const NotifyArgs& args, int channel, Read&& read, F&& f) {
    const Layout& layout = args.layout;
    const int end = layout.even_first_token(args.rank, channel + 1),
              max_count = tokens_at_once<W>(layout);
    PerLane<W, T> value, following;
    auto lanes_at = [&](int token) { return lanes_from(token, end, max_count) * layout.topk; };
    auto read_at = [&](int token) {
        const size_t first = static_cast<size_t>(token) * layout.topk;
        warp.lanes(lanes_at(token), [&](int lane) { following[lane] = read(first + lane); });
    };
    int token = layout.even_first_token(args.rank, channel);
    if (token < end) read_at(token);
    for (; token < end; token += max_count) {
        value = following;
        if (token + max_count < end) read_at(token + max_count);
        f(token, lanes_at(token), value);
    }
}

// Adds 1 to counts[key[lane]] for every lane whose key is >= 0.
template <WarpLike W>
EP_FN void count_keys(W& warp, int lanes, const PerLane<W, int>& key, int32_t* counts) {
    PerLane<W, uint32_t> equal;
    warp.match(lanes, key, equal);
    warp.lanes(lanes, [&](int lane) {
        if (equal[lane] && lowest_lane(equal[lane]) == lane)
            W::add(counts + key[lane], popcount(equal[lane]));
    });
}

// Does the same and returns in before[lane] how often the lane's key came earlier: its count so far
// plus the lower lanes with the same key.
template <WarpLike W>
EP_FN void count_keys(W& warp, int lanes, const PerLane<W, int>& key, int32_t* counts,
                      PerLane<W, int>& before) {
    PerLane<W, uint32_t> equal;
    warp.match(lanes, key, equal);
    warp.lanes(lanes, [&](int lane) {
        if (equal[lane]) before[lane] = counts[key[lane]] + lanes_below(equal[lane], lane);
    });
    warp.lanes(lanes, [&](int lane) {
        if (equal[lane] && lowest_lane(equal[lane]) == lane)
            counts[key[lane]] += popcount(equal[lane]);
    });
}

// Marks the counts as unknown. Called by any one warp before step 1. If the counts never come, a
// caller that does not wait for them finds -1 rows for every expert, and no call uses a layout of
// epoch 0.
template <WarpLike W>
EP_FN void mark_unknown(W& warp, const NotifyArgs& args) {
    const int local_experts = args.layout.local_experts();
    for (int first = 0; first < local_experts; first += 32) {
        warp.lanes(lanes_from(first, local_experts),
                   [&](int lane) { args.set_expert_rows(first + lane, -1); });
    }
    warp.lanes(1, [&](int) { args.layout.totals().overflow = -1; });
}

// Step 1, one warp per channel: reads the ids and counts them. A token with an id outside [-1, E),
// or with a repeated id, is counted as going nowhere, so that no later step sees an invalid id.
// Returns 1 + the index of such a token, or 0.
template <WarpLike W>
EP_FN int count_channel(W& warp, const NotifyArgs& args, int channel) {
    const Layout& layout = args.layout;
    const int topk = layout.topk, local_experts = layout.local_experts();
    auto clear = [&](int32_t* counts, int count) {
        for (int first = 0; first < count; first += 32) {
            warp.lanes(lanes_from(first, count), [&](int lane) { counts[first + lane] = 0; });
        }
    };
    clear(&layout.rank_tokens(channel, 0), layout.world());
    clear(&layout.node_tokens(channel, 0), layout.topology.nodes);
    if (layout.even_first_token(args.rank, channel) ==
        layout.even_first_token(args.rank, channel + 1))
        return 0;
    clear(layout.expert_counts(channel), layout.num_experts);

    using Ids = PerLane<W, int64_t>;
    PerLane<W, int> expert, rank, node, key;
    int bad_token = 0;
    auto read_id = [&](size_t i) {
        return args.index_bytes == 8 ? static_cast<const int64_t*>(args.topk_idx)[i]
                                     : static_cast<const int32_t*>(args.topk_idx)[i];
    };
    auto count = [&](int token, int lanes, const Ids& id) {
        const size_t first = static_cast<size_t>(token) * topk;
        // The lanes of a mask that belong to this lane's token, from bit 0 on.
        auto of_token = [&](uint32_t mask, int lane) {
            return mask >> lane / topk * topk & first_lanes(topk);
        };
        warp.lanes(lanes, [&](int lane) {
            const bool named = id[lane] >= 0 && id[lane] < layout.num_experts;
            expert[lane] = named ? static_cast<int>(id[lane]) : -1;
            key[lane] = named ? lane / topk * layout.num_experts + expert[lane] : -1;
        });
        const uint32_t firsts = warp.first_of(lanes, key);
        const uint32_t invalid = warp.ballot(lanes, [&](int lane) {
            return id[lane] < -1 || id[lane] >= layout.num_experts ||
                   (expert[lane] >= 0 && !(firsts >> lane & 1) && !args.allows_repeats);
        });
        if (invalid) bad_token = token + lowest_lane(invalid) / topk + 1;
        warp.lanes(lanes, [&](int lane) {
            if (of_token(invalid, lane)) expert[lane] = -1;
            layout.experts(0)[first + lane] = expert[lane];
            rank[lane] = expert[lane] < 0 ? -1 : expert[lane] / local_experts;
            node[lane] = expert[lane] < 0 ? -1 : layout.topology.node_of(rank[lane]);
            key[lane] = expert[lane] < 0 ? -1 : lane / topk * layout.world() + rank[lane];
        });
        count_keys(warp, lanes, expert, layout.expert_counts(channel));
        // keep one lane per (token, rank), and one per (token, node)
        const uint32_t ranks = warp.first_of(lanes, key);
        warp.lanes(lanes, [&](int lane) {
            key[lane] = expert[lane] < 0 ? -1 : lane / topk * layout.topology.nodes + node[lane];
            if (!(ranks >> lane & 1)) rank[lane] = -1;
        });
        const uint32_t nodes = warp.first_of(lanes, key);
        warp.lanes(lanes, [&](int lane) {
            if (!(nodes >> lane & 1)) node[lane] = -1;
        });
        count_keys(warp, lanes, rank, &layout.rank_tokens(channel, 0));
        count_keys(warp, lanes, node, &layout.node_tokens(channel, 0));
    };
    for_some_tokens<int64_t>(warp, args, channel, read_id, count);
    return bad_token;
}

// Step 2, experts divided among warps: each expert's counts per channel become the sums over the
// channels before; row C of expert_counts holds the totals.
template <WarpLike W>
EP_FN void sum_channels(W& warp, const NotifyArgs& args, int expert) {
    const Layout& layout = args.layout;
    const auto channels = layout.used_channels(args.rank);
    auto count_of = [&](int i) -> int32_t& { return layout.expert_counts(channels[i])[expert]; };
    const int sum = scan_table(
        warp, 1, channels.count(), [&](int, int i) { return count_of(i); },
        [&](int, int i, int, int before) { count_of(i) = before; });
    warp.lanes(1, [&](int) { layout.expert_counts(layout.channels)[expert] = sum; });
}

// Steps 1 and 2 by warp `number` of `warps`. meet() returns once all of them are as far. Afterwards
// the layout's bad_token tells whether ids are invalid.
template <WarpLike W, class Meet>
EP_FN void count_own_rows(W& warp, const NotifyArgs& args, int number, int warps, Meet&& meet) {
    if (number == 0) mark_unknown(warp, args);
    int bad_token = 0;
    for (int channel = number; channel < args.layout.channels; channel += warps) {
        if (const int bad = count_channel(warp, args, channel)) bad_token = bad;
    }
    meet();
    if (bad_token) warp.lanes(1, [&](int) { args.layout.totals().bad_token = bad_token; });
    for (int expert = number; expert < args.layout.num_experts; expert += warps)
        sum_channels(warp, args, expert);
    meet();
}

// Step 3, one warp per channel: stores for every (token, k) how many earlier rows of this rank go
// to the same expert. A row's position is this index plus the start of the rank's rows at the
// expert, so warps and ranks share no counter.
template <WarpLike W>
EP_FN void index_channel(W& warp, const NotifyArgs& args, int channel) {
    const Layout& layout = args.layout;
    using Experts = PerLane<W, int>;
    Experts index;
    auto read_expert = [&](size_t i) { return layout.experts(0)[i]; };
    for_some_tokens<int>(
        warp, args, channel, read_expert, [&](int token, int lanes, const Experts& expert) {
            warp.lanes(lanes, [&](int lane) { index[lane] = 0; });
            count_keys(warp, lanes, expert, layout.expert_counts(channel), index);
            warp.lanes(lanes, [&](int lane) { layout.index(token)[lane] = index[lane]; });
        });
}

}  // namespace ep
