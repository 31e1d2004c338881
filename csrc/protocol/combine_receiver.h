#pragma once

#include "protocol/combine.h"

namespace ep {

// The last role of combine: sums each of this rank's tokens from the partial sums of this node's
// ranks and of the other nodes. With R receivers in a channel, receiver r sums tokens r, r + R, ...
// of the channel, at the same time as the others. Two steps go in the order of the tokens:
//   take up   finds which slots of the rings hold the token's rows. That depends on how many rows
//             earlier tokens have in each ring, so it waits for them, but not for rows.
//   free      moves the rings' heads past these slots. A head is one number, so this waits until
//             the slots of earlier tokens are free.
// No deadlock: the receiver of the first token that is not freed waits for rows only, and has
// published all heads that it can before it waits.

// Progress of a channel's receivers, in tokens of all calls.
struct ReceiverOrder {
    uint64_t before;    // tokens of all calls before this one
    uint64_t taken_up;  // tokens whose slots are known
    uint64_t freed;     // tokens whose slots are free
    uint64_t own_rows;  // rows of this rank's own experts that this call's tokens have taken up
};

template <class F>
EP_FN ReceiverOrder& receiver_order(const Rings<F>& rings) {
    return *rings.fabric.template own<ReceiverOrder>(rings.args.heap.receiver_order(rings.channel));
}

// Marks none of this call's rows as taken up. Called by the receiver of the first token.
template <WarpLike W, class F>
EP_FN void open_in_rings(W& warp, const Rings<F>& rings) {
    const TransferArgs& args = rings.args;
    const int peers = args.topology().ranks_per_node, nodes = args.other_nodes();
    auto open = [](InCursor& in) { in.taken_up = in.next; };
    for (int first = 0; first < peers; first += 32) {
        warp.lanes(lanes_from(first, peers),
                   [&](int lane) { open(rings.nvl_in(args.node(), first + lane)); });
    }
    for (int first = 0; first < nodes; first += 32) {
        warp.lanes(lanes_from(first, nodes),
                   [&](int lane) { open(rings.rdma_in(args.other_node(first + lane))); });
    }
    warp.lanes(1, [&](int) { receiver_order(rings).own_rows = 0; });
}

// Returns the sum of a token's rows from this rank's own experts. If nothing else has made it, the
// receiver does, in its slot of the ring that carries no rows.
template <class T, bool kWeighted, WarpLike W, class F>
EP_FN const char* sum_of_own(W& warp, const Rings<F>& rings, const CombineArgs& args, int receiver,
                             int64_t received, const typename W::template PerLane<int>& dst_row) {
    const ExpertRows<T, kWeighted, W> rows(warp, args, dst_row);
    if (rows.lanes && (args.sums || rows.is_one_row())) return rows.summed(warp, args, received);
    char* sum = rings.nvl_own_slot(receiver) + args.format.payload();
    rows.sum(warp, args, sum);
    return sum;
}

// Puts a token's biases before its partial sums in `part`. Returns the lanes of both.
template <WarpLike W>
EP_FN uint32_t add_biases(W& warp, const CombineArgs& args, int token,
                          typename W::template PerLane<const void*>& part, uint32_t sources) {
    const int biases = args.num_biases();
    const size_t offset = static_cast<size_t>(token) * args.format.payload_bytes;
    typename W::template PerLane<const void*> addends;
    warp.lanes(biases, [&](int lane) { addends[lane] = args.bias[lane] + offset; });
    for_each_lane(sources, [&](int from) {
        const void* row = warp.broadcast(part, from);
        warp.lanes(biases + args.format.topk, [&](int lane) {
            if (lane == biases + from) addends[lane] = row;
        });
    });
    part = addends;
    return sources << biases | ((uint32_t{1} << biases) - 1);
}

// One of a channel's receivers. kAlone: the only one. It has no order to keep, and the registers
// which that takes would slow down its sums.
template <class T, bool kWeighted, bool kAlone, WarpLike W, class F>
EP_FN void receive_tokens(W& warp, const Rings<F>& rings, const CombineArgs& args, int receiver,
                          int receivers) {
    const RowFormat& format = args.format;
    const Topology& topology = args.topology();
    const int own_node = args.node(), channel = rings.channel;
    const int first = args.layout.first_token(args.rank, channel),
              end = args.layout.first_token(args.rank, channel + 1);
    if (first + receiver >= end) return;
    typename W::template PerLane<int> expert, following;
    // Source of each k's row: a local rank, or ranks_per_node + another node.
    typename W::template PerLane<int> source;
    typename W::template PerLane<int> dst_row, following_dst_row;  // of rows of this rank's experts
    typename W::template PerLane<uint64_t> next;                   // position in each ring
    typename W::template PerLane<uint64_t> tag;                    // of each row from a ring
    typename W::template PerLane<const void*> part;
    auto is_own = [&](int source) { return source == args.local(); };
    auto is_local = [&](int source) { return source < topology.ranks_per_node; };
    auto node_of = [&](int source) { return source - topology.ranks_per_node; };
    auto ring_of = [&](int source) -> InCursor& {
        return is_local(source) ? rings.nvl_in(own_node, source) : rings.rdma_in(node_of(source));
    };
    auto read_experts = [&](int token) {
        warp.lanes(format.topk,
                   [&](int lane) { following[lane] = args.layout.experts(token)[lane]; });
    };
    ReceiverOrder& order = receiver_order(rings);
    const uint64_t before = order.before;
    auto reached = [&](uint64_t& tokens, int token) {
        return WaitCondition{W::template acquire<Scope::Rank>(&tokens), before + (token - first),
                             args.rank};
    };
    const int64_t first_received = args.layout.received_start(channel, args.rank);
    int64_t received = first_received;
    int batch = 0;  // tokens since free slots were published
    if constexpr (kAlone) read_dst_rows(warp, args, received, following_dst_row);
    read_experts(first + receiver);
    for (int token = first + receiver; token < end; token += receivers) {
        expert = following;
        if (token + receivers < end) read_experts(token + receivers);
        // Where the token's partial sums come from: this rank, local ranks, other nodes.
        warp.lanes(format.topk, [&](int lane) {
            const int rank = expert[lane] < 0 ? -1 : expert[lane] / args.layout.local_experts();
            const int node = rank < 0 ? -1 : topology.node_of(rank);
            source[lane] = rank < 0           ? -1
                           : node == own_node ? topology.local_of(rank)
                                              : topology.ranks_per_node + node;
        });
        const uint32_t sources = warp.last_of(format.topk, source);
        const uint32_t own = warp.ballot(
            format.topk, [&](int lane) { return sources >> lane & 1 && is_own(source[lane]); });
        const uint32_t others = sources & ~own;

        // Take up: find the slots of the rows. A lone receiver reads them from the rings' cursors.
        if constexpr (!kAlone) {
            const auto may_take_up = [&](int) { return reached(order.taken_up, token); };
            if (!warp.wait_all(Wait::ReceiverOrder, 1, may_take_up)) return;
            if (token == first) open_in_rings(warp, rings);
            received = first_received + static_cast<int64_t>(order.own_rows);
            warp.lanes(format.topk, [&](int lane) {
                if (source[lane] >= 0 && !is_own(source[lane]))
                    next[lane] = ring_of(source[lane]).taken_up;
            });
            warp.lanes(format.topk, [&](int lane) {
                if (others >> lane & 1) ring_of(source[lane]).taken_up = next[lane] + 1;
                if (own >> lane & 1) order.own_rows = received + 1 - first_received;
            });
            warp.template publish<Scope::Rank>(&order.taken_up, before + (token - first) + 1);
        }

        // The sum over this rank's own experts.
        const char* own_sum = nullptr;
        if (own) {
            if constexpr (kAlone) {  // a lone receiver knows its next row
                dst_row = following_dst_row;
                read_dst_rows(warp, args, received + 1, following_dst_row);
            } else {
                read_dst_rows(warp, args, received, dst_row);
            }
            own_sum = sum_of_own<T, kWeighted>(warp, rings, args, receiver, received++, dst_row);
        }
        // Wait for the others' rows. If some are missing, wait until they arrive or this token is
        // the next to be freed: then the heads may be published before the receiver waits on.
        auto arrived = [&](int lane) {
            if (source[lane] < 0) return nothing_to_wait_for();
            if (is_own(source[lane])) {
                if (!args.sums) return nothing_to_wait_for();
                const int part = args.sum_warp_of(static_cast<int>(received - 1 - first_received));
                return sums_done<W>(rings, args, args.rank, part, received);
            }
            // A lone receiver reads the cursor here, before the flag.
            if constexpr (kAlone) next[lane] = ring_of(source[lane]).next;
            return is_local(source[lane]) ? nvl_row_at<W>(rings, own_node, source[lane], next[lane])
                                          : rdma_row<W>(rings, node_of(source[lane]), next[lane]);
        };
        auto may_free = [&](int) { return reached(order.freed, token); };
        bool here = warp.met(format.topk, arrived);
        if (!here && !kAlone) {
            const auto arrived_or_next = [&](int lane) {
                return is_met(may_free(lane)) ? nothing_to_wait_for() : arrived(lane);
            };
            if (!warp.wait_all(Wait::PartialRow, format.topk, arrived_or_next)) return;
            here = warp.met(format.topk, arrived);
        }
        // A lone receiver publishes free slots here, while rows are in flight.
        if (!here || (kAlone && ++batch == args.nvl_batch)) {
            publish_heads(warp, rings, own_node);
            batch = 0;
        }
        if (!here && !warp.wait_all(Wait::PartialRow, format.topk, arrived)) return;
        // Sum, and pass on the gradients of weights that came with the rows.
        warp.lanes(format.topk, [&](int lane) {
            uint64_t gradient = 0;
            if (source[lane] >= 0 && is_own(source[lane])) {
                part[lane] = own_sum;
                gradient = weight_of(args, received - 1, lane, dst_row[lane]);
            } else if (source[lane] >= 0) {
                const char* in = is_local(source[lane])
                                     ? rings.nvl_in_slot(own_node, source[lane], next[lane])
                                     : rings.rdma_in_slot(node_of(source[lane]), next[lane]);
                tag[lane] = *reinterpret_cast<const uint64_t*>(in + format.tag());
                part[lane] = in + format.payload();
                gradient = load_weight(in + format.weights() + lane * format.weight_bytes,
                                       format.weight_bytes);
            }
            char* weight = args.y_weights +
                           (static_cast<size_t>(token) * format.topk + lane) * format.weight_bytes;
            store_weight(weight, gradient, format.weight_bytes);
        });
        const auto rank_of = [&](int lane) {
            const int from = warp.broadcast(source, lane);
            return is_local(from) ? rings.rank_at(own_node, from)
                                  : rings.rank_at(node_of(from), args.local());
        };
        if (!belong_to_call(warp, rings, others, tag, rank_of)) return;
        const uint32_t addends =
            args.bias[0] ? add_biases(warp, args, token, part, sources) : sources;
        warp.template sum<T, CacheHint::Keep>(
            args.y + static_cast<size_t>(token) * format.payload_bytes, part, addends,
            format.payload_bytes / sizeof(T));

        // Free the slots, in the order of the tokens.
        if (!kAlone && !warp.wait_all(Wait::ReceiverOrder, 1, may_free)) return;
        warp.template credit_lanes<Scope::Rank>(format.topk, [&](int lane, auto&& store) {
            if (!(others >> lane & 1)) return;
            if (is_local(source[lane])) {
                rings.nvl_in(own_node, source[lane]).next = next[lane] + 1;
            } else {
                store(&rings.rdma_in(node_of(source[lane])).next, next[lane] + 1);
            }
        });
        const int freed = token - first + 1;
        const bool is_last = token + 1 == end;
        if (is_last || (!kAlone && freed % args.nvl_batch == 0))
            publish_heads(warp, rings, own_node);
        if (is_last) warp.lanes(1, [&](int) { forget_sums(rings, args, args.rank); });
        if constexpr (!kAlone) {
            if (is_last) warp.lanes(1, [&](int) { order.before = before + freed; });
            warp.template publish<Scope::Rank>(&order.freed, before + freed);
        }
    }
}

// One of at most as many receivers as a ring has slots.
template <class T, bool kWeighted, WarpLike W, FabricLike<W> F>
EP_FN void combine_receiver(W& warp, F& fabric, const CombineArgs& args, int channel, int receiver,
                            int receivers) {
    const Rings<F> rings{fabric, args, channel};
    if (receivers == 1) return receive_tokens<T, kWeighted, true>(warp, rings, args, 0, 1);
    receive_tokens<T, kWeighted, false>(warp, rings, args, receiver, receivers);
}

}  // namespace ep
