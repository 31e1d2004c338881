#include "core/planned_layout.h"

#include <algorithm>

namespace ep {
namespace {

// f(channel, rows) for each channel of the source that has some of a move's rows. `layout`: of any
// rank.
template <class F>
void for_channels(Layout layout, const Move& move, const int32_t* tokens, F&& f) {
    layout.num_tokens = tokens[move.source];
    for (int channel = 0; channel < layout.channels; ++channel) {
        const int first = std::max(move.token, layout.first_token(move.source, channel));
        const int end =
            std::min(move.token + move.rows, layout.first_token(move.source, channel + 1));
        if (first < end) f(channel, end - first);
    }
}

}  // namespace

void lay_out(const Layout& layout, int rank, const Move* moves, size_t count, const int32_t* tokens,
             uint32_t epoch) {
    const Topology& topology = layout.topology;
    const int own_node = topology.node_of(rank);
    std::fill_n(layout.data, layout.size(), 0);
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
                for_channels(layout, *move, tokens, [&](int channel, int rows) {
                    layout.node_tokens(channel, node) += rows;
                });
            }
        }
        if (move->rank == rank) {
            for_channels(layout, *move, tokens, [&](int channel, int rows) {
                layout.received(channel, move->source) += rows;
            });
        }
        const bool is_on_rail = topology.local_of(move->source) == topology.local_of(rank);
        if (is_on_rail && is_first_on_node && node == own_node && source_node != own_node) {
            for_channels(layout, *move, tokens,
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
    layout.expert_count(0) = totals.expert_rows = totals.received_rows;  // each has one place
    for (int expert = 1; expert <= layout.local_experts(); ++expert)
        layout.expert_start(expert) = totals.expert_rows;
    totals.epoch = epoch;
}

}  // namespace ep
