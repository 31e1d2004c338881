#pragma once

#include "protocol/dispatch.h"
#include "protocol/expert_rows.h"

namespace ep {

// Roles of combine: the pipeline of dispatch run backwards. The experts' rows for a token go
//
//   to a rank of this node:
//     combine_nvl_sender (sums a rank's experts) -> NVLink ring -> combine_receiver
//   to a rank of another node:
//     combine_nvl_sender -> NVLink ring -> combine_forwarder (sums a node's ranks) -> staging
//     -> sender_coordinator -> network ring -> combine_receiver (sums the nodes)
//
// There is no staging where the fabric maps the rail. Rows for this rank's own tokens pass through
// no ring: combine_receiver sums them itself, or waits until the intra-rank pass has. A ring
// belongs to one source rank and channel, as in dispatch, so a full ring towards one node never
// holds up rows of another. All sums run over k in the order of the token's experts: a rank, or a
// node, takes the place of its last expert.

// Condition that warp `part` of the intra-rank pass has summed its rows before row `end`, an index
// into all rows that arrive at this rank.
template <WarpLike W, class F>
EP_FN WaitCondition sums_done(const Rings<F>& rings, const CombineArgs& args, int rank, int part,
                              int64_t end) {
    const int rows = static_cast<int>(end - args.layout.received_start(rings.channel, rank));
    return {W::template acquire<Scope::Rank>(&rings.to_rank(rank).summed[part]),
            static_cast<uint64_t>(args.rows_of_sum_warp(part, rows)), args.rank};
}

// Clears the counts of sums for `rank`, so that the next call starts at 0. Called by their reader
// once it has waited for all of them. A call number would not do instead: a graph replays a call
// with the same number.
template <class F>
EP_FN void reset_sums(const Rings<F>& rings, const CombineArgs& args, int rank) {
    for (int part = 0; args.sums && part < args.sum_warps; ++part)
        rings.to_rank(rank).summed[part] = 0;
}

template <WarpLike W, class F>
EP_FN bool wait_for_sums(W& warp, const Rings<F>& rings, const CombineArgs& args, int rank,
                         int64_t end) {
    return !args.sums || warp.wait_all(Wait::PartialRow, args.sum_warps, [&](int part) {
        return sums_done<W>(rings, args, rank, part, end);
    });
}

// Sends rows from the experts to the rings towards up to `max_count` source ranks, from
// other_rank(first) on. kWeighted: multiplies each expert's row by its weight; the later sums of
// partial sums use none.
template <class T, bool kWeighted, WarpLike W, FabricLike<W> F>
EP_FN void combine_nvl_sender(W& warp, F& fabric, const CombineArgs& args, int channel, int first,
                              int max_count) {
    const Rings<F> rings{fabric, args, channel};
    const RowFormat& format = args.format;
    const int count = lanes_from(first, args.other_ranks(), max_count);
    if (!open_nvl_rings(warp, rings, count, [&](int i) { return args.other_rank(first + i); }))
        return;
    PerLane<W, int> dst_row, following;
    PerLane<W, uint64_t> weight;
    auto cursor = [&](int node, int peer) -> OutCursor& { return rings.nvl_out(node, peer); };
    auto serve = [&](const ReadyBatch& batch) {
        if (!wait_for_sums(warp, rings, args, batch.rank, batch.first + batch.rows)) return false;
        read_dst_rows(warp, args, batch.first, following);
        for (int i = 0; i < batch.rows; ++i) {
            dst_row = following;  // the next row's are read while this one is summed
            if (i + 1 < batch.rows) read_dst_rows(warp, args, batch.first + i + 1, following);
            char* slot = rings.nvl_out_slot(batch.node, batch.peer, batch.position + i);
            warp.lanes(format.topk, [&](int k) {  // these loads overlap with the sum
                weight[k] = weight_of(args, batch.first + i, k, dst_row[k]);
            });
            const ExpertRows<T, kWeighted, W> rows(warp, args, dst_row);
            if (args.sums && rows.lanes) {
                warp.template copy<CacheHint::Keep>(slot + format.payload(),
                                                    rows.summed(warp, args, batch.first + i),
                                                    format.payload_bytes);
            } else {
                rows.sum(warp, args, slot + format.payload());
            }
            warp.lanes(format.topk, [&](int k) {
                store_weight(slot + format.weights() + k * format.weight_bytes, weight[k],
                             format.weight_bytes);
                if (k == 0) *reinterpret_cast<uint64_t*>(slot + format.tag()) = rings.tag;
            });
        }
        const uint64_t next = batch.position + batch.rows;
        OutCursor& out = rings.nvl_out(batch.node, batch.peer);
        warp.lanes(1, [&](int) { out.next = out.published = next; });
        warp.template publish<Scope::System>(rings.nvl_out_tail(batch.node, batch.peer), next);
        return true;
    };
    poll_rings(warp, rings, first, count, Wait::NvlCredit, cursor, nvl_credit<W, F>, serve);
    for (int i = 0; i < count; i += 32) {
        warp.lanes(lanes_from(i, count), [&](int lane) {
            const int rank = args.other_rank(first + i + lane);
            const OutCursor& out = rings.to_rank(rank);
            if (out.next == out.end) reset_sums(rings, args, rank);
        });
    }
}

// What a node's next sum lacked at the last check: the row of a local rank (its index), or:
constexpr int kLacksCredit = -1, kLacksNothing = -2;

// The sums for one node, made by the warp that serves it.
template <class T, WarpLike W, class F>
struct NodeSums {
    W& warp;
    const Rings<F>& rings;
    const CombineArgs& args;
    const int node;
    const RowFormat& format = args.format;
    uint64_t next = rings.rdma_out(node).next;
    PerLane<W, int> expert, peer;
    PerLane<W, uint64_t> taken, tag;
    PerLane<W, const void*> part;

    EP_FN WaitCondition arrived(int lane) {
        if (peer[lane] < 0) return nothing_to_wait_for();
        const WaitCondition need = nvl_row<W>(rings, node, peer[lane]);
        taken[lane] = need.required;
        return need;
    }

    // Returns what the next sum lacks. `peer` has the local ranks whose rows it adds.
    EP_FN int lack() {
        const auto has_arrived = [&](int lane) { return arrived(lane); };
        while (!warp.met(format.topk, has_arrived)) {
            const uint32_t absent =
                warp.ballot(format.topk, [&](int lane) { return !is_met(arrived(lane)); });
            if (absent) return warp.broadcast(peer, lowest_lane(absent));
        }
        return warp.met(1, [&](int) { return rdma_credit<W>(rings, node, next); }) ? kLacksNothing
                                                                                   : kLacksCredit;
    }

    // Sums the next token's rows and publishes the sum. Returns false if a row is not of this call.
    EP_FN bool sum(uint32_t lanes) {
        char* slot = rings.rdma_out_slot(node, next);
        warp.lanes(format.topk, [&](int lane) {
            if (lane == 0) *reinterpret_cast<uint64_t*>(slot + format.tag()) = rings.tag;
            if (peer[lane] < 0) return;
            const char* in = rings.nvl_in_slot(node, peer[lane], taken[lane] - 1);
            tag[lane] = *reinterpret_cast<const uint64_t*>(in + format.tag());
            part[lane] = in + format.payload();
            const size_t weight = format.weights() + lane * format.weight_bytes;
            store_weight(slot + weight, load_weight(in + weight, format.weight_bytes),
                         format.weight_bytes);
        });
        const auto rank_of = [&](int lane) {
            return rings.rank_at(args.node(), warp.broadcast(peer, lane));
        };
        if (!belong_to_call(warp, rings, lanes, tag, rank_of)) return false;
        warp.template sum<T, CacheHint::Keep>(slot + format.payload(), part, Unweighted{}, lanes,
                                              format.payload_bytes / sizeof(T));
        warp.lanes(format.topk, [&](int lane) {
            if (lanes >> lane & 1) rings.nvl_in(node, peer[lane]).next = taken[lane];
        });
        warp.template publish<Scope::Rank>(&rings.rdma_out(node).next, ++next);
        return true;
    }

    // Forwards rows that have arrived, from `start` on. Returns how many, or -1 if one belongs to
    // another call; `lacks` gets what the next one lacks.
    EP_FN int forward(int64_t start, int max_rows, int& lacks) {
        int rows = 0;
        for (; rows < max_rows; ++rows) {
            warp.lanes(format.topk, [&](int lane) {
                expert[lane] = args.rail_experts[(start + rows) * format.topk + lane];
            });
            const uint32_t lanes = peers_on_node(warp, args, args.node(), expert, peer);
            lacks = lack();
            if (lacks != kLacksNothing) break;
            if (!sum(lanes)) return -1;
        }
        if (rows) publish_heads(warp, rings, node);
        return rows;
    }
};

// Takes the rows that ranks of this node made for tokens of up to `max_count` other nodes, from
// other_node(first) on, sums them per token, and sends the sums. Tokens of a node go in their
// order, nodes in the order in which they become ready: blocking on one could close a cycle of
// nodes that wait for each other's partial sums.
template <class T, WarpLike W, FabricLike<W> F>
EP_FN void combine_forwarder(W& warp, F& fabric, const CombineArgs& args, int channel, int first,
                             int max_count = 32) {
    const Rings<F> rings{fabric, args, channel};
    const int count = lanes_from(first, args.other_nodes(), max_count);
    if (!has_room_for_rail(warp, args, channel, first, count)) return;
    if (!open_rdma_rings(warp, rings, first, count)) return;
    PerLane<W, int> left, lacks;
    warp.lanes(count, [&](int lane) {
        left[lane] = args.layout.rail(channel, args.other_node(first + lane));
        lacks[lane] = kLacksNothing;
    });
    auto lack_of = [&](int lane) {
        if (!left[lane]) return never();
        const int node = args.other_node(first + lane);
        if (lacks[lane] == kLacksNothing) return nothing_to_wait_for();
        return lacks[lane] == kLacksCredit ? rdma_credit<W>(rings, node, rings.rdma_out(node).next)
                                           : nvl_row<W>(rings, node, lacks[lane]);
    };
    while (const uint32_t open = warp.ballot(count, [&](int lane) { return left[lane] > 0; })) {
        // If the wait expires, the incident names what the first node lacks.
        const bool for_credit = warp.broadcast(lacks, lowest_lane(open)) == kLacksCredit;
        const uint32_t ready =
            warp.wait_any(for_credit ? Wait::RdmaCredit : Wait::NvlRow, count, lack_of);
        if (!ready) return;
        bool go_on = true;
        for_each_lane(ready, [&](int of_node) {
            if (!go_on) return;
            const int node = args.other_node(first + of_node);
            const int rows_left = warp.broadcast(left, of_node);
            const int max_rows = rows_left < args.nvl_batch ? rows_left : args.nvl_batch;
            const int64_t start = args.layout.rail_end(channel, node) - rows_left;
            int lack = kLacksNothing;
            const int rows =
                NodeSums<T, W, F>{warp, rings, args, node}.forward(start, max_rows, lack);
            go_on = rows >= 0;
            if (!go_on) return;
            warp.lanes(count, [&](int lane) {
                if (lane != of_node) return;
                left[lane] -= rows;
                lacks[lane] = lack;
            });
        });
        if (!go_on) return;
    }
}

}  // namespace ep
