#pragma once

#include "protocol/dispatch.h"

namespace ep {

// Roles of combine: the pipe of dispatch run backwards.
//
//   expert rows --combine_nvl_sender (sums a rank's experts)--> NVLink ring -------------------------------> combine_receiver, same node
//                  \--> NVLink ring --combine_forwarder (sums a node's ranks)--> staging -sender_coordinator-> network ring --> combine_receiver
//
// A ring belongs to one source rank and channel here too, so a full ring towards one node never holds up the rows of another. All
// sums run over k in the order of the token's experts: a rank, or a node, takes the place of its first expert.

// Serves the rings towards up to `most` source ranks, whichever has room: blocking on one could close a circle of full rings.
template <class T, WarpLike W, FabricLike<W> F>
EP_FN void combine_nvl_sender(W& warp, F& fabric, const CombineArgs& args, int channel, int first_rank, int most = 32) {
    const Rings<F> rings{fabric, args, channel};
    const Topology& topology = args.topology();
    const RowFormat& format = args.format;
    const int count = lanes_from(first_rank, topology.world(), most);
    if (!open_nvl_rings(warp, rings, first_rank, count)) return;
    typename W::template PerLane<int> left, position;
    typename W::template PerLane<uint64_t> room;
    typename W::template PerLane<const void*> part;
    warp.lanes(count, [&](int lane) { left[lane] = args.layout.received(channel, first_rank + lane); });
    while (warp.ballot(count, [&](int lane) { return left[lane] > 0; })) {
        const uint32_t ready = warp.wait_any(Wait::NvlCredit, count, [&](int lane) {
            if (!left[lane]) return never();
            const Need need =
                nvl_credit<W>(rings, topology.node_of(first_rank + lane), topology.local_of(first_rank + lane));
            room[lane] = need.seen;
            return need;
        });
        if (!ready) return;
        for_each_lane(ready, [&](int lane) {
            const int source = first_rank + lane;
            const int node = topology.node_of(source), peer = topology.local_of(source);
            const int rows_left = warp.broadcast(left, lane);
            const uint64_t limit = warp.broadcast(room, lane);
            uint64_t next = rings.nvl_out(node, peer).next;
            int rows = 0;
            for (; rows < rows_left && rows < args.nvl_batch && next != limit; ++rows, ++next) {
                const int64_t received = args.layout.received_start(channel, source) +
                                         args.layout.received(channel, source) - rows_left + rows;
                char* slot = rings.nvl_out_slot(node, peer, next);
                warp.lanes(format.topk, [&](int k) {
                    position[k] = received < args.max_received ? args.positions[received * format.topk + k]
                                                               : TransferArgs::kOverflowed;
                    part[k] = args.x + static_cast<int64_t>(position[k]) * format.payload_bytes;
                    if (k == 0) *reinterpret_cast<uint64_t*>(slot + format.tag()) = row_tag(args);
                    char* weight = slot + format.weights() + k * format.weight_bytes;
                    if (position[k] >= 0) {
                        copy_weight(weight, args.weights + static_cast<size_t>(position[k]) * format.weight_bytes,
                                    format.weight_bytes);
                    } else {
                        const uint64_t zero = 0;
                        copy_weight(weight, reinterpret_cast<const char*>(&zero), format.weight_bytes);
                    }
                });
                const uint32_t parts = warp.ballot(format.topk, [&](int k) { return position[k] >= 0; });
                warp.template sum<T>(slot + format.payload(), part, parts, format.payload_bytes / sizeof(T));
            }
            warp.lanes(1, [&](int) { rings.nvl_out(node, peer).next = rings.nvl_out(node, peer).published = next; });
            warp.template publish<Scope::System>(rings.nvl_out_tail(node, peer), next);
            warp.lanes(count, [&](int other) {
                if (other == lane) left[other] -= rows;
            });
        });
    }
}

// Towards one other node: pops, for each of its tokens in turn, the rows of the local ranks that had it, and sums them.
template <class T, WarpLike W, FabricLike<W> F>
EP_FN void combine_forwarder(W& warp, F& fabric, const CombineArgs& args, int channel, int node) {
    const Rings<F> rings{fabric, args, channel};
    const RowFormat& format = args.format;
    if (!open_rdma_ring(warp, rings, node)) return;
    typename W::template PerLane<int> peer;
    typename W::template PerLane<const void*> part;
    const int rows = args.layout.rail(channel, node);
    const int64_t start = args.layout.rail_start(channel, node);
    uint64_t next = rings.rdma_out(node).next;
    int batch = 0;
    for (int i = 0; i < rows; ++i) {
        const uint32_t lanes =
            peers_on_node(warp, args, args.node(), args.rail_experts + (start + i) * format.topk, peer);
        auto arrived = [&](int lane) {
            return lanes >> lane & 1 ? nvl_row<W>(rings, node, peer[lane]) : nothing_to_wait_for();
        };
        if (++batch == args.nvl_batch || !warp.met(format.topk, arrived)) {
            publish_heads(warp, rings, node);
            batch = 0;
        }
        if (!warp.wait_all(Wait::NvlRow, format.topk, arrived)) return;
        if (!warp.wait_all(Wait::RdmaCredit, 1, [&](int) { return rdma_credit<W>(rings, node); })) return;
        char* slot = rings.rdma_out_slot(node, next);
        warp.lanes(format.topk, [&](int lane) {
            if (lane == 0) *reinterpret_cast<uint64_t*>(slot + format.tag()) = row_tag(args);
            if (peer[lane] < 0) return;
            const char* row = rings.nvl_in_slot(node, peer[lane], rings.nvl_in(node, peer[lane]).next);
            part[lane] = row + format.payload();
            const size_t weight = format.weights() + lane * format.weight_bytes;
            copy_weight(slot + weight, row + weight, format.weight_bytes);
        });
        bool same_call = true;
        for_each_lane(lanes, [&](int lane) {
            const char* row = static_cast<const char*>(warp.broadcast(part, lane)) - format.payload();
            same_call =
                same_call && belongs_to_call(warp, args, row, rings.rank_at(args.node(), warp.broadcast(peer, lane)));
        });
        if (!same_call) return;
        warp.template sum<T>(slot + format.payload(), part, lanes, format.payload_bytes / sizeof(T));
        warp.lanes(format.topk, [&](int lane) {
            if (lanes >> lane & 1) ++rings.nvl_in(node, peer[lane]).next;
        });
        warp.template publish<Scope::Rank>(&rings.rdma_out(node).next, ++next);
    }
    publish_heads(warp, rings, node);
}

// Own tokens in order: sums what the ranks of this node and the other nodes made of each.
template <class T, WarpLike W, FabricLike<W> F>
EP_FN void combine_receiver(W& warp, F& fabric, const CombineArgs& args, int channel) {
    const Rings<F> rings{fabric, args, channel};
    const RowFormat& format = args.format;
    const Topology& topology = args.topology();
    const int own_node = args.node();
    typename W::template PerLane<int> source;  // the ring of each k: a local rank, or ranks_per_node + another node
    typename W::template PerLane<const void*> part;
    auto is_local = [&](int source) { return source < topology.ranks_per_node; };
    auto node_of = [&](int source) { return source - topology.ranks_per_node; };
    int batch = 0;
    for (int token = args.layout.first_token(channel); token < args.layout.first_token(channel + 1); ++token) {
        warp.lanes(format.topk, [&](int lane) {
            const int expert = args.layout.experts(token)[lane];
            const int rank = expert < 0 ? -1 : expert / args.layout.local_experts();
            const int node = expert < 0 ? -1 : topology.node_of(rank);
            source[lane] = expert < 0         ? -1
                           : node == own_node ? topology.local_of(rank)
                                              : topology.ranks_per_node + node;
        });
        const uint32_t lanes = warp.first_of(format.topk, source);
        auto arrived = [&](int lane) {
            if (!(lanes >> lane & 1)) return nothing_to_wait_for();
            return is_local(source[lane]) ? nvl_row<W>(rings, own_node, source[lane])
                                          : rdma_row<W>(rings, node_of(source[lane]));
        };
        if (++batch == args.nvl_batch || !warp.met(format.topk, arrived)) {
            publish_heads(warp, rings, own_node);
            batch = 0;
        }
        if (!warp.wait_all(Wait::PartialRow, format.topk, arrived)) return;
        warp.lanes(format.topk, [&](int lane) {
            char* weight = args.y_weights + (static_cast<size_t>(token) * format.topk + lane) * format.weight_bytes;
            const uint64_t zero = 0;
            const char* gradient = reinterpret_cast<const char*>(&zero);
            if (source[lane] >= 0) {
                const char* row =
                    is_local(source[lane])
                        ? rings.nvl_in_slot(own_node, source[lane], rings.nvl_in(own_node, source[lane]).next)
                        : rings.rdma_in_slot(node_of(source[lane]), rings.rdma_in(node_of(source[lane])).next);
                part[lane] = row + format.payload();
                gradient = row + format.weights() + lane * format.weight_bytes;
            }
            copy_weight(weight, gradient, format.weight_bytes);
        });
        bool same_call = true;
        for_each_lane(lanes, [&](int lane) {
            const int from = warp.broadcast(source, lane);
            const int rank =
                is_local(from) ? rings.rank_at(own_node, from) : rings.rank_at(node_of(from), args.local());
            same_call = same_call &&
                        belongs_to_call(warp, args,
                                        static_cast<const char*>(warp.broadcast(part, lane)) - format.payload(), rank);
        });
        if (!same_call) return;
        warp.template sum<T>(args.y + static_cast<size_t>(token) * format.payload_bytes, part, lanes,
                             format.payload_bytes / sizeof(T));
        warp.template publish_lanes<Scope::Rank>(format.topk, [&](int lane, auto&& store) {
            if (!(lanes >> lane & 1)) return;
            if (is_local(source[lane])) {
                ++rings.nvl_in(own_node, source[lane]).next;
            } else {
                uint64_t* next = &rings.rdma_in(node_of(source[lane])).next;
                store(next, *next + 1);
            }
        });
    }
    publish_heads(warp, rings, own_node);
}

}  // namespace ep
