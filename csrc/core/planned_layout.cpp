#include "core/planned_layout.h"

#include <algorithm>
#include <cassert>
#include <vector>

namespace ep {
namespace {

// Successive tokens of a rank, and the work that a channel has for each.
struct Stretch {
    int32_t first, tokens;
    int64_t work;
};

// The stretches of each rank, in token order.
std::vector<std::vector<Stretch>> stretches_of(int world, const Move* moves, size_t count,
                                               const int32_t* tokens, int leaving) {
    std::vector<std::vector<Stretch>> all(world);
    for (const Move* move = moves; move < moves + count; ++move) {
        std::vector<Stretch>& own = all[move->source];
        if (own.empty() || own.back().first != move->token)
            own.push_back({move->token, move->rows, 1});
        if (move->rank != move->source) own.back().work += leaving;
    }
    for (int rank = 0; rank < world; ++rank) {
        std::vector<Stretch>& own = all[rank];
        std::ranges::sort(own, {}, &Stretch::first);
        int32_t end = 0;
        for (size_t i = 0, moved = own.size(); i < moved; ++i) {
            if (own[i].first > end) own.push_back({end, own[i].first - end, 1});
            end = own[i].first + own[i].tokens;
        }
        if (end < tokens[rank]) own.push_back({end, tokens[rank] - end, 1});
        std::ranges::sort(own, {}, &Stretch::first);
    }
    return all;
}

// Where the tokens of a rank's channels begin, [C + 1]: equal shares of the work, rounded as
// Layout::first_token rounds shares of the tokens.
std::vector<int32_t> first_tokens_of(const std::vector<Stretch>& stretches, int rank, int world,
                                     int channels) {
    int64_t work = 0, tokens = 0;
    for (const Stretch& stretch : stretches) {
        work += stretch.work * stretch.tokens;
        tokens += stretch.tokens;
    }
    const int64_t shift = tokens ? work / tokens * rank / world : 0;
    std::vector<int32_t> first(channels + 1, static_cast<int32_t>(tokens));
    first[0] = 0;
    auto stretch = stretches.begin();
    int64_t before = 0;  // work of the stretches before
    for (int channel = 1; channel < channels; ++channel) {
        const int64_t share = work * channel / channels + shift;
        for (; stretch < stretches.end() && before + stretch->work * stretch->tokens <= share;
             ++stretch)
            before += stretch->work * stretch->tokens;
        if (stretch == stretches.end()) break;
        first[channel] = stretch->first + static_cast<int32_t>((share - before) / stretch->work);
    }
    return first;
}

}  // namespace

void lay_out(const Layout& layout, int rank, const Move* moves, size_t count, const int32_t* tokens,
             uint32_t epoch, int leaving) {
    assert(layout.is_planned);
    const Topology& topology = layout.topology;
    const int own_node = topology.node_of(rank);
    std::fill_n(layout.data, layout.size(), 0);
    std::vector<std::vector<int32_t>> first_tokens;
    for (const auto& stretches : stretches_of(layout.world(), moves, count, tokens, leaving)) {
        const int source = static_cast<int>(first_tokens.size());
        first_tokens.push_back(first_tokens_of(stretches, source, layout.world(), layout.channels));
    }
    std::ranges::copy(first_tokens[rank], &layout.planned_first_token(0));
    // calls f(channel, rows) for each channel of the source that has some of a move's rows
    auto for_channels = [&](const Move& move, auto&& f) {
        const std::vector<int32_t>& first_token = first_tokens[move.source];
        for (int channel = 0; channel < layout.channels; ++channel) {
            const int first = std::max(move.token, first_token[channel]);
            const int end = std::min(move.token + move.rows, first_token[channel + 1]);
            if (first < end) f(channel, end - first);
        }
    };
    std::fill_n(layout.experts(0), static_cast<size_t>(layout.num_tokens) * layout.topk, -1);
    for (const Move* move = moves; move < moves + count; ++move) {
        const int node = topology.node_of(move->rank), source_node = topology.node_of(move->source);
        const bool is_same_token =
            move > moves && move[-1].source == move->source && move[-1].token == move->token;
        const bool is_first_on_node = !is_same_token || topology.node_of(move[-1].rank) != node;
        if (move->source == rank) {
            for (int i = 0; i < move->rows; ++i) {
                layout.experts(move->token + i)[move->k] = move->rank * layout.local_experts();
                layout.index(move->token + i)[move->k] = move->place + i;
            }
            if (is_first_on_node) {
                for_channels(*move, [&](int channel, int rows) {
                    layout.node_tokens(channel, node) += rows;
                });
            }
        }
        if (move->rank == rank) {
            for_channels(*move, [&](int channel, int rows) {
                layout.received(channel, move->source) += rows;
            });
        }
        const bool is_on_rail = topology.local_of(move->source) == topology.local_of(rank);
        if (is_on_rail && is_first_on_node && node == own_node && source_node != own_node) {
            for_channels(*move,
                         [&](int channel, int rows) { layout.rail(channel, source_node) += rows; });
        }
    }
    Layout::Totals& totals = layout.totals();
    for (int source = 0; source < layout.world(); ++source) {
        for (int channel = 0; channel < layout.channels; ++channel) {
            layout.received_start(channel, source) = totals.received_rows;
            totals.received_rows += layout.received(channel, source);
        }
    }
    for (int node = 0; node < topology.nodes; ++node) {
        for (int channel = 0; channel < layout.channels; ++channel) {
            layout.rail_start(channel, node) = totals.rail_rows;
            totals.rail_rows += layout.rail(channel, node);
        }
    }
    layout.expert_count(0) = totals.expert_rows =
        totals.received_rows;  // each row has one expert row
    for (int expert = 1; expert <= layout.local_experts(); ++expert)
        layout.expert_start(expert) = totals.expert_rows;
    totals.epoch = epoch;
}

}  // namespace ep
