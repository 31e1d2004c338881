#pragma once

#include "core/args.h"
#include "exec/warp.h"
#include "fabric/fabric.h"

namespace ep {

// Counts travel as rows do: along the rail to the node, then inside the node to the rank. One block goes to a node (the counts of each of
// its ranks, then tokens per channel); one block of it goes on to a rank (rows per local expert, then rows per channel).
//
// Blocks are double-buffered by the epoch's parity. That suffices: a rank that is done with epoch e has heard from all ranks that
// they entered e, so all of them are done reading e - 1.

template <WarpLike W>
EP_FN void copy_counts(W& warp, int32_t* dst, const int32_t* src, int count, int src_stride = 1, int dst_stride = 1) {
    for (int first = 0; first < count; first += 32) {
        warp.lanes(count - first < 32 ? count - first : 32,
                   [&](int lane) { dst[(first + lane) * dst_stride] = src[(first + lane) * src_stride]; });
    }
}

template <WarpLike W, FabricLike<W> F>
EP_FN void send_counts(W& warp, F& fabric, const NotifyArgs& args) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int own_node = topology.node_of(args.rank);
    const int parity = args.epoch & 1;
    for (int node = 0; node < topology.nodes; ++node) {
        const size_t staging =
            node == own_node ? heap.notify_rail(parity, own_node) : heap.notify_staging(parity, node);
        int32_t* block = fabric.template own<int32_t>(staging);
        for (int local = 0; local < topology.ranks_per_node; ++local) {
            const int rank = topology.rank(node, local);
            copy_counts(warp, block, layout.expert_counts(layout.channels) + rank * layout.local_experts(),
                        layout.local_experts());
            copy_counts(warp, block + layout.local_experts(), &layout.rank_tokens(0, rank), layout.channels,
                        layout.world());
            block += heap.rank_counts();
        }
        copy_counts(warp, block, &layout.node_tokens(0, node), layout.channels, topology.nodes);
        if (node == own_node) continue;
        fabric.put(warp, heap.channels, node, heap.notify_rail(parity, own_node), staging, heap.node_block_bytes());
        fabric.put_signal(warp, heap.channels, node, heap.notify_rail_flag(own_node), args.epoch - 1, args.epoch);
    }
}

template <WarpLike W, FabricLike<W> F>
EP_FN bool relay_counts(W& warp, F& fabric, const NotifyArgs& args) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int own_node = topology.node_of(args.rank);
    const int own_local = topology.local_of(args.rank);
    const int parity = args.epoch & 1;
    for (int node = 0; node < topology.nodes; ++node) {
        const bool here = warp.wait_all(Wait::NotifyRail, 1, [&](int) {
            if (node == own_node) return nothing_to_wait_for();
            return Need{fabric.template acquire_signal<W>(heap.channels, heap.notify_rail_flag(node)), args.epoch,
                        topology.rank(node, own_local)};
        });
        if (!here) return false;
        const int32_t* block = fabric.template own<int32_t>(heap.notify_rail(parity, node));
        for (int local = 0; local < topology.ranks_per_node; ++local, block += heap.rank_counts()) {
            int32_t* counts =
                fabric.template peer<int32_t>(local, heap.notify_node(parity, topology.rank(node, own_local)));
            copy_counts(warp, counts, block, heap.rank_counts());
        }
        copy_counts(warp, &layout.rail(0, node), block, layout.channels, 1, topology.nodes);
    }
    for (int local = 0; local < topology.ranks_per_node; ++local) {
        warp.template publish<Scope::System>(fabric.template peer<uint64_t>(local, heap.notify_node_flag(own_local)),
                                             args.epoch);
    }
    return true;
}

// Prefix sums over a [C, W]-like table, rank (or node) after rank, channel after channel.
template <WarpLike W, class Count, class Start>
EP_FN int scan_rows(W& warp, int sources, int channels, Count&& count, Start&& start) {
    typename W::template PerLane<int> rows;
    int sum = 0;
    for (int first = 0; first < sources * channels; first += 32) {
        const int lanes = sources * channels - first < 32 ? sources * channels - first : 32;
        auto at = [&](int lane) { return first + lane; };
        warp.lanes(lanes, [&](int lane) { rows[lane] = count(at(lane) % channels, at(lane) / channels); });
        const int total = warp.exclusive_scan(lanes, rows);
        warp.lanes(lanes, [&](int lane) { start(at(lane) % channels, at(lane) / channels) = sum + rows[lane]; });
        sum += total;
    }
    return sum;
}

// Everything that dispatch needs to know: where each source rank's rows start at each expert and how many rows each ring will carry.
template <WarpLike W, FabricLike<W> F>
EP_FN bool receive_counts(W& warp, F& fabric, const NotifyArgs& args) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int parity = args.epoch & 1;
    for (int first = 0; first < topology.ranks_per_node; first += 32) {
        const int count = topology.ranks_per_node - first < 32 ? topology.ranks_per_node - first : 32;
        const bool here = warp.wait_all(Wait::NotifyNode, count, [&](int lane) {
            const size_t flag = heap.notify_node_flag(first + lane);
            return Need{W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag)), args.epoch,
                        topology.rank(topology.node_of(args.rank), first + lane)};
        });
        if (!here) return false;
    }
    const int world = layout.world(), local_experts = layout.local_experts(), channels = layout.channels;
    for (int rank = 0; rank < world; ++rank) {
        const int32_t* counts = fabric.template own<int32_t>(heap.notify_node(parity, rank));
        copy_counts(warp, layout.expert_base(rank), counts, local_experts);
        copy_counts(warp, &layout.received(0, rank), counts + local_experts, channels, 1, world);
    }
    auto received = [&](int channel, int rank) -> int32_t& { return layout.received(channel, rank); };
    auto received_start = [&](int channel, int rank) -> int32_t& { return layout.received_start(channel, rank); };
    auto rail = [&](int channel, int node) {
        return node == topology.node_of(args.rank) ? 0 : layout.rail(channel, node);
    };
    auto rail_start = [&](int channel, int node) -> int32_t& { return layout.rail_start(channel, node); };
    const int received_rows = scan_rows(warp, world, channels, received, received_start);
    const int rail_rows = scan_rows(warp, topology.nodes, channels, rail, rail_start);

    typename W::template PerLane<int> rows;
    int expert_rows = 0;
    for (int first = 0; first < local_experts; first += 32) {
        const int lanes = local_experts - first < 32 ? local_experts - first : 32;
        warp.lanes(lanes, [&](int lane) {
            int count = 0;
            for (int rank = 0; rank < world; ++rank) count += layout.expert_base(rank)[first + lane];
            layout.expert_count(first + lane) = count;
            rows[lane] = args.expert_capacity > 0 ? args.expert_capacity
                                                  : static_cast<int>(align_up(count, args.expert_alignment));
        });
        const int total = warp.exclusive_scan(lanes, rows);
        warp.lanes(lanes, [&](int lane) {
            int start = expert_rows + rows[lane];
            layout.expert_start(first + lane) = start;
            for (int rank = 0; rank < world; ++rank) {
                const int count = layout.expert_base(rank)[first + lane];
                layout.expert_base(rank)[first + lane] = start;
                start += count;
            }
        });
        expert_rows += total;
    }
    warp.lanes(1, [&](int) {
        layout.expert_start(local_experts) = expert_rows;
        layout.totals().received_rows = received_rows;
        layout.totals().expert_rows = expert_rows;
        layout.totals().rail_rows = rail_rows;
        layout.totals().epoch = static_cast<uint32_t>(args.epoch);
    });
    return true;
}

template <WarpLike W, FabricLike<W> F>
EP_FN bool notify(W& warp, F& fabric, const NotifyArgs& args) {
    send_counts(warp, fabric, args);
    return relay_counts(warp, fabric, args) && receive_counts(warp, fabric, args);
}

}  // namespace ep
