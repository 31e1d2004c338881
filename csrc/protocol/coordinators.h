#pragma once

#include "protocol/ring.h"

namespace ep {

// Coordinators: warps between the rings and the network. One warp serves up to 32 nodes of a
// channel, one lane per node, in dispatch and in combine.

// How many rows this rank puts to a node in a channel, and takes from it. Dispatch puts own tokens
// and takes those of others; combine puts the results for others' tokens.
struct RailCounts {
    const Layout& layout;
    int own_node;
    bool combine;

    EP_FN int own(int channel, int node) const {
        return node == own_node ? 0 : layout.node_tokens(channel, node);
    }
    EP_FN int others(int channel, int node) const {
        return node == own_node ? 0 : layout.rail(channel, node);
    }
    EP_FN int put(int channel, int node) const {
        return combine ? others(channel, node) : own(channel, node);
    }
    EP_FN int taken(int channel, int node) const {
        return combine ? own(channel, node) : others(channel, node);
    }
};

// Follows in each lane a cursor that another role of this rank moves from done[lane] to end[lane].
// Calls forward(lane, from, to) when it has moved by `chunk` or more (fewer at the end).
template <WarpLike W, class Cursor, class Forward>
EP_FN void follow(W& warp, Wait wait, int count, uint64_t chunk, int rank,
                  PerLane<W, uint64_t>& done, const PerLane<W, uint64_t>& end, Cursor&& cursor,
                  Forward&& forward) {
    PerLane<W, uint64_t> moved;
    while (warp.ballot(count, [&](int lane) { return done[lane] != end[lane]; })) {
        const uint32_t ready = warp.wait_any(wait, count, [&](int lane) {
            if (done[lane] == end[lane]) return never();
            moved[lane] = W::template acquire<Scope::Rank>(cursor(lane));
            return WaitCondition{
                moved[lane], done[lane] + chunk < end[lane] ? done[lane] + chunk : end[lane], rank};
        });
        if (!ready) return;
        for_each_lane(ready, [&](int lane) {
            forward(lane, warp.broadcast(done, lane), warp.broadcast(moved, lane));
        });
        warp.lanes(count, [&](int lane) {
            if (ready >> lane & 1) done[lane] = moved[lane];
        });
    }
}

// Puts packed rows [from, to) of the network ring to their node, in pieces that do not wrap around.
template <WarpLike W, FabricLike<W> F>
EP_FN void put_rows(W& warp, const Rings<F>& rings, int node, uint64_t from, uint64_t to) {
    const TransferArgs& args = rings.args;
    const size_t data = args.heap.rdma_data(rings.channel, args.node(), node);
    const size_t staging = args.heap.rdma_staging(rings.channel, node, args.node());
    for (uint64_t next = from; next != to;) {
        const uint64_t room = rings.rdma_slots - (next & (rings.rdma_slots - 1));
        const uint64_t rows = to - next < room ? to - next : room;
        const size_t offset = rings.slot(next, rings.rdma_slots);
        rings.fabric.put_to(warp, rings.channel, args.on_rail(node), data + offset,
                            staging + offset, rows * rings.slot_bytes);
        next += rows;
    }
}

// Puts finished rows to their node, unless they were written there, then signals the tail.
template <WarpLike W, FabricLike<W> F>
EP_FN void sender_coordinator(W& warp, F& fabric, const TransferArgs& args,
                              const RailCounts& counts, int channel, int first_node) {
    const Rings<F> rings{fabric, args, channel};
    const int count = lanes_from(first_node, args.topology().nodes);
    PerLane<W, uint64_t> put{}, end{};
    warp.lanes(count, [&](int lane) {
        put[lane] = rings.rdma_out(first_node + lane).published;
        end[lane] = put[lane] + counts.put(channel, first_node + lane);
    });
    auto filled = [&](int lane) { return &rings.rdma_out(first_node + lane).next; };
    auto send = [&](int lane, uint64_t from, uint64_t to) {
        const int node = first_node + lane;
        if constexpr (!F::kMapsAll) put_rows(warp, rings, node, from, to);
        fabric.signal_to(warp, channel, args.on_rail(node),
                         args.heap.rdma_tail(channel, args.node()), from, to);
    };
    follow(warp, Wait::PackedRow, count, args.chunk(), args.rank, put, end, filled, send);
    warp.lanes(count, [&](int lane) { rings.rdma_out(first_node + lane).published = put[lane]; });
}

// Returns credit: sends each node the number of its rows taken out of the network ring.
template <WarpLike W, FabricLike<W> F>
EP_FN void forwarder_coordinator(W& warp, F& fabric, const TransferArgs& args,
                                 const RailCounts& counts, int channel, int first_node) {
    const Rings<F> rings{fabric, args, channel};
    const int count = lanes_from(first_node, args.topology().nodes);
    PerLane<W, uint64_t> credited{}, end{};
    warp.lanes(count, [&](int lane) {
        credited[lane] = rings.rdma_in(first_node + lane).published;
        end[lane] = credited[lane] + counts.taken(channel, first_node + lane);
    });
    auto taken = [&](int lane) { return &rings.rdma_in(first_node + lane).next; };
    auto credit = [&](int lane, uint64_t from, uint64_t to) {
        fabric.credit_to(warp, channel, args.on_rail(first_node + lane),
                         args.heap.rdma_head(channel, args.node()), from, to);
    };
    follow(warp, Wait::FreedRow, count, args.chunk(), args.rank, credited, end, taken, credit);
    warp.lanes(count,
               [&](int lane) { rings.rdma_in(first_node + lane).published = credited[lane]; });
}

}  // namespace ep
