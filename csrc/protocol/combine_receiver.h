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
    uint64_t assigned;  // tokens whose slots are known
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
    auto open = [](InCursor& in) { in.assigned = in.next; };
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
                             int64_t received, const PerLane<W, int>& dst_row) {
    const ExpertRows<T, kWeighted, W> rows(warp, args, dst_row);
    if (rows.lanes && (args.sums || rows.is_one_row())) return rows.summed(warp, args, received);
    char* sum = rings.nvl_own_slot(receiver) + args.format.payload();
    rows.sum(warp, args, sum);
    return sum;
}

// Puts a token's biases before its partial sums in `part`. Returns the lanes of both.
template <WarpLike W>
EP_FN uint32_t add_biases(W& warp, const CombineArgs& args, int token,
                          PerLane<W, const void*>& part, uint32_t sources) {
    const int biases = args.num_biases();
    const size_t offset = static_cast<size_t>(token) * args.format.payload_bytes;
    PerLane<W, const void*> addends;
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

// One of a channel's receivers, at one of its tokens. kAlone: the only receiver. It has no order to
// keep, and the registers which that takes would slow down its sums.
template <class T, bool kWeighted, bool kAlone, WarpLike W, class F>
struct TokenReceiver {
    W& warp;
    const Rings<F>& rings;
    const CombineArgs& args;
    const int receiver, first;  // the channel's first token
    const RowFormat& format = args.format;
    const Topology& topology = args.topology();
    const int own_node = args.node();
    ReceiverOrder& order = receiver_order(rings);
    const uint64_t before = order.before;  // tokens of earlier calls
    const int64_t first_received = args.layout.received_start(rings.channel, args.rank);
    int64_t received = first_received;
    int batch = 0;  // tokens since free slots were published
    PerLane<W, int> expert;
    // Source of each k's row: a local rank, or ranks_per_node + another node.
    PerLane<W, int> source;
    PerLane<W, int> dst_row, following_dst_row;  // of rows of this rank's experts
    PerLane<W, uint64_t> next;                   // position in each ring
    PerLane<W, uint64_t> tag;                    // of each row from a ring
    PerLane<W, const void*> part;
    uint32_t sources, own, others;  // lanes with a partial sum, of this rank, of others
    const char* own_sum;            // over this rank's experts

    EP_FN TokenReceiver(W& w, const Rings<F>& r, const CombineArgs& a, int number, int first_token)
        : warp(w), rings(r), args(a), receiver(number), first(first_token) {
        if constexpr (kAlone) read_dst_rows(warp, args, received, following_dst_row);
    }

    EP_FN bool is_own(int from) const { return from == args.local(); }
    EP_FN bool is_local(int from) const { return from < topology.ranks_per_node; }
    EP_FN int node_of(int from) const { return from - topology.ranks_per_node; }
    EP_FN InCursor& ring_of(int from) const {
        return is_local(from) ? rings.nvl_in(own_node, from) : rings.rdma_in(node_of(from));
    }
    EP_FN WaitCondition reached(uint64_t& tokens, int token) const {
        return WaitCondition{W::template acquire<Scope::Rank>(&tokens), before + (token - first),
                             args.rank};
    }

    // Finds where the token's partial sums come from: this rank, local ranks, other nodes.
    EP_FN void find_sources() {
        warp.lanes(format.topk, [&](int lane) {
            const int rank = expert[lane] < 0 ? -1 : expert[lane] / args.layout.local_experts();
            const int node = rank < 0 ? -1 : topology.node_of(rank);
            source[lane] = rank < 0           ? -1
                           : node == own_node ? topology.local_of(rank)
                                              : topology.ranks_per_node + node;
        });
        sources = warp.last_of(format.topk, source);
        own = warp.ballot(format.topk,
                          [&](int lane) { return sources >> lane & 1 && is_own(source[lane]); });
        others = sources & ~own;
    }

    // Finds the slots of the rows. A lone receiver reads them from the rings' cursors later.
    EP_FN bool assign_slots(int token) {
        if constexpr (kAlone) return true;
        const auto may_assign = [&](int) { return reached(order.assigned, token); };
        if (!warp.wait_all(Wait::ReceiverOrder, 1, may_assign)) return false;
        if (token == first) open_in_rings(warp, rings);
        received = first_received + static_cast<int64_t>(order.own_rows);
        warp.lanes(format.topk, [&](int lane) {
            if (source[lane] >= 0 && !is_own(source[lane]))
                next[lane] = ring_of(source[lane]).assigned;
        });
        warp.lanes(format.topk, [&](int lane) {
            if (others >> lane & 1) ring_of(source[lane]).assigned = next[lane] + 1;
            if (own >> lane & 1) order.own_rows = received + 1 - first_received;
        });
        warp.template publish<Scope::Rank>(&order.assigned, before + (token - first) + 1);
        return true;
    }

    EP_FN void sum_own() {
        own_sum = nullptr;
        if (!own) return;
        if constexpr (kAlone) {  // a lone receiver knows its next row
            dst_row = following_dst_row;
            read_dst_rows(warp, args, received + 1, following_dst_row);
        } else {
            read_dst_rows(warp, args, received, dst_row);
        }
        own_sum = sum_of_own<T, kWeighted>(warp, rings, args, receiver, received++, dst_row);
    }

    EP_FN WaitCondition arrived(int lane) {
        if (source[lane] < 0) return nothing_to_wait_for();
        if (is_own(source[lane])) {
            if (!args.sums) return nothing_to_wait_for();
            const int warp_of_sum =
                args.sum_warp_of(static_cast<int>(received - 1 - first_received));
            return sums_done<W>(rings, args, args.rank, warp_of_sum, received);
        }
        // A lone receiver reads the cursor here, before the flag.
        if constexpr (kAlone) next[lane] = ring_of(source[lane]).next;
        return is_local(source[lane]) ? nvl_row_at<W>(rings, own_node, source[lane], next[lane])
                                      : rdma_row<W>(rings, node_of(source[lane]), next[lane]);
    }
    EP_FN WaitCondition may_free(int token) const { return reached(order.freed, token); }

    // Waits for the others' rows. If some are missing, waits until they arrive or this token is the
    // next to be freed: then the heads may be published before the receiver waits on.
    EP_FN bool wait_for_rows(int token) {
        const auto has_arrived = [&](int lane) { return arrived(lane); };
        bool here = warp.met(format.topk, has_arrived);
        if (!here && !kAlone) {
            const auto arrived_or_next = [&](int lane) {
                return is_met(may_free(token)) ? nothing_to_wait_for() : arrived(lane);
            };
            if (!warp.wait_all(Wait::PartialRow, format.topk, arrived_or_next)) return false;
            here = warp.met(format.topk, has_arrived);
        }
        // A lone receiver publishes free slots here, while rows are in flight.
        if (!here || (kAlone && ++batch == args.nvl_batch)) {
            publish_heads(warp, rings, own_node);
            batch = 0;
        }
        return here || warp.wait_all(Wait::PartialRow, format.topk, has_arrived);
    }

    // Sums the rows, and passes on the gradients of weights that came with them. Returns false if a
    // row is not of this call.
    EP_FN bool add_rows(int token) {
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
        if (!belong_to_call(warp, rings, others, tag, rank_of)) return false;
        const uint32_t addends =
            args.bias[0] ? add_biases(warp, args, token, part, sources) : sources;
        warp.template sum<T, CacheHint::Keep>(
            args.y + static_cast<size_t>(token) * format.payload_bytes, part, Unweighted{}, addends,
            format.payload_bytes / sizeof(T));
        return true;
    }

    // Frees the slots, in the order of the tokens.
    EP_FN bool free_slots(int token, bool is_last) {
        const auto is_next = [&](int) { return may_free(token); };
        if (!kAlone && !warp.wait_all(Wait::ReceiverOrder, 1, is_next)) return false;
        warp.template credit_lanes<Scope::Rank>(format.topk, [&](int lane, auto&& store) {
            if (!(others >> lane & 1)) return;
            if (is_local(source[lane])) {
                rings.nvl_in(own_node, source[lane]).next = next[lane] + 1;
            } else {
                store(&rings.rdma_in(node_of(source[lane])).next, next[lane] + 1);
            }
        });
        const int freed = token - first + 1;
        if (is_last || (!kAlone && freed % args.nvl_batch == 0))
            publish_heads(warp, rings, own_node);
        if (is_last) warp.lanes(1, [&](int) { reset_sums(rings, args, args.rank); });
        if constexpr (!kAlone) {
            if (is_last) warp.lanes(1, [&](int) { order.before = before + freed; });
            warp.template publish<Scope::Rank>(&order.freed, before + freed);
        }
        return true;
    }
};

template <class T, bool kWeighted, bool kAlone, WarpLike W, class F>
EP_FN void receive_tokens(W& warp, const Rings<F>& rings, const CombineArgs& args, int receiver,
                          int receivers) {
    const int first = args.layout.first_token(args.rank, rings.channel),
              end = args.layout.first_token(args.rank, rings.channel + 1);
    if (first + receiver >= end) return;
    TokenReceiver<T, kWeighted, kAlone, W, F> one(warp, rings, args, receiver, first);
    PerLane<W, int> following;
    auto read_experts = [&](int token) {
        warp.lanes(args.format.topk,
                   [&](int lane) { following[lane] = args.layout.experts(token)[lane]; });
    };
    read_experts(first + receiver);
    for (int token = first + receiver; token < end; token += receivers) {
        one.expert = following;
        if (token + receivers < end) read_experts(token + receivers);
        one.find_sources();
        if (!one.assign_slots(token)) return;
        one.sum_own();
        if (!one.wait_for_rows(token) || !one.add_rows(token)) return;
        if (!one.free_slots(token, token + 1 == end)) return;
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
