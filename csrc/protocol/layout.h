#pragma once

#include "core/args.h"
#include "exec/warp.h"

namespace ep {

// The layout of one rank's own tokens, in three steps that each need the one before on all channels. Nobody else is asked.

// Step 1, a warp a channel: reads the ids and counts them. A token with an id outside [-1, E) or with the same id twice counts
// as going nowhere and is reported, so that no later step can meet an invalid id.
template <WarpLike W>
EP_FN void count_channel(W& warp, const NotifyArgs& args, int channel) {
    const Layout& layout = args.layout;
    const int local_experts = layout.local_experts();
    auto clear = [&](int32_t* counts, int count) {
        for (int first = 0; first < count; first += 32) {
            warp.lanes(count - first < 32 ? count - first : 32, [&](int lane) { counts[first + lane] = 0; });
        }
    };
    clear(layout.expert_counts(channel), layout.num_experts);
    clear(&layout.rank_tokens(channel, 0), layout.world());
    clear(&layout.node_tokens(channel, 0), layout.topology.nodes);

    typename W::template PerLane<int> expert, rank, node;
    for (int token = layout.first_token(channel); token < layout.first_token(channel + 1); ++token) {
        const size_t row = static_cast<size_t>(token) * layout.topk;
        auto id_of = [&](int lane) -> int64_t {
            return args.index_bytes == 8 ? static_cast<const int64_t*>(args.topk_idx)[row + lane]
                                         : static_cast<const int32_t*>(args.topk_idx)[row + lane];
        };
        uint32_t invalid =
            warp.ballot(layout.topk, [&](int lane) { return id_of(lane) < -1 || id_of(lane) >= layout.num_experts; });
        warp.lanes(layout.topk, [&](int lane) { expert[lane] = invalid ? -1 : static_cast<int>(id_of(lane)); });
        const uint32_t named = warp.ballot(layout.topk, [&](int lane) { return expert[lane] >= 0; });
        invalid |= named & ~warp.first_of(layout.topk, expert);
        if (invalid) layout.totals().bad_token = token + 1;
        warp.lanes(layout.topk, [&](int lane) {
            if (invalid) expert[lane] = -1;
            layout.experts(token)[lane] = expert[lane];
            rank[lane] = expert[lane] < 0 ? -1 : expert[lane] / local_experts;
            node[lane] = expert[lane] < 0 ? -1 : layout.topology.node_of(rank[lane]);
            if (expert[lane] >= 0) ++layout.expert_counts(channel)[expert[lane]];
        });
        const uint32_t ranks = warp.first_of(layout.topk, rank);
        const uint32_t nodes = warp.first_of(layout.topk, node);
        warp.lanes(layout.topk, [&](int lane) {
            if (ranks >> lane & 1) ++layout.rank_tokens(channel, rank[lane]);
            if (nodes >> lane & 1) ++layout.node_tokens(channel, node[lane]);
        });
    }
}

// Step 2, any warp any experts: counts per channel become sums over the channels before; row C holds the totals.
template <WarpLike W>
EP_FN void sum_channels(W& warp, const NotifyArgs& args, int first_expert, int num_experts) {
    for (int base = first_expert; base < first_expert + num_experts; base += 32) {
        const int count = first_expert + num_experts - base < 32 ? first_expert + num_experts - base : 32;
        warp.lanes(count, [&](int lane) {
            int32_t sum = 0;
            for (int channel = 0; channel <= args.layout.channels; ++channel) {
                int32_t& here = args.layout.expert_counts(channel)[base + lane];
                const int32_t rows = channel < args.layout.channels ? here : 0;
                here = sum;
                sum += rows;
            }
        });
    }
}

// Step 3, a warp a channel: every (token, k) learns how many rows of this rank go to the same expert before it. That number and
// the start of the rank's rows at the expert are a row's position: no counter is shared by anyone.
template <WarpLike W>
EP_FN void index_channel(W& warp, const NotifyArgs& args, int channel) {
    const Layout& layout = args.layout;
    for (int token = layout.first_token(channel); token < layout.first_token(channel + 1); ++token) {
        warp.lanes(layout.topk, [&](int lane) {
            const int expert = layout.experts(token)[lane];
            layout.index(token)[lane] = expert < 0 ? 0 : layout.expert_counts(channel)[expert]++;
        });
    }
}

}  // namespace ep
