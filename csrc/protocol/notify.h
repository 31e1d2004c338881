#pragma once

#include "core/args.h"
#include "exec/warp.h"
#include "fabric/fabric.h"
#include "protocol/counts.h"

namespace ep {

// Counts travel as rows do: along the rail to the node, then inside the node to the rank. One block
// goes to a node (the counts of each of its ranks, then tokens per channel); one block of it goes
// on to a rank (rows per local expert, then rows per channel).
//
// Blocks are double-buffered by the epoch's parity. That suffices: a rank that is done with epoch e
// has heard from all ranks that they entered e, so all of them are done reading e - 1.

// What a rank tells another about its own tokens: rows for each of its experts, rows per channel.
EP_FN int32_t rank_count(const Layout& layout, int rank, int item) {
    const int local_experts = layout.local_experts();
    return item < local_experts ? layout.expert_counts(layout.channels)[rank * local_experts + item]
                                : layout.rank_tokens(item - local_experts, rank);
}

// Own counts for the ranks of another node, along the rail.
template <WarpLike W, FabricLike<W> F>
EP_FN void send_counts(W& warp, F& fabric, const NotifyArgs& args, int node) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int own_node = topology.node_of(args.rank);
    const int parity = args.epoch & 1;
    const int rank_counts = static_cast<int>(heap.rank_counts());
    int32_t* block = fabric.template network<int32_t>(heap.notify_staging(parity, node));
    auto count_of = [&](int number) -> int32_t {
        const int local = number / rank_counts, item = number % rank_counts;
        if (local == topology.ranks_per_node) return layout.node_tokens(item, node);
        return rank_count(layout, topology.rank(node, local), item);
    };
    move_counts(warp, static_cast<int>(heap.node_counts()), count_of,
                [&](int number, int32_t count) { block[number] = count; });
    fabric.put(warp, heap.channels, node, heap.notify_rail(parity, own_node),
               heap.notify_staging(parity, node), heap.node_block_bytes());
    fabric.put_signal(warp, heap.channels, node, heap.notify_rail_flag(own_node), args.epoch - 1,
                      args.epoch);
}

// What this rank has to tell, and what its rail told it, to a rank of its node. The role towards
// itself also keeps how many rows will pass through here.
template <WarpLike W, FabricLike<W> F>
EP_FN bool relay_counts(W& warp, F& fabric, const NotifyArgs& args, int local) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int own_node = topology.node_of(args.rank);
    const int own_local = topology.local_of(args.rank);
    const int parity = args.epoch & 1;
    const int rank_counts = static_cast<int>(heap.rank_counts());
    for (int node = 0; node < topology.nodes; ++node) {
        int32_t* target = fabric.template peer<int32_t>(
            local, heap.notify_node(parity, topology.rank(node, own_local)));
        auto pass_on = [&](int item, int32_t count) { target[item] = count; };
        if (node == own_node) {
            const int rank = topology.rank(node, local);
            move_counts(
                warp, rank_counts, [&](int item) { return rank_count(layout, rank, item); },
                pass_on);
            continue;
        }
        const bool here = warp.wait_all(Wait::NotifyRail, 1, [&](int) {
            return WaitCondition{
                fabric.template acquire_signal<W>(heap.channels, heap.notify_rail_flag(node)),
                args.epoch, topology.rank(node, own_local)};
        });
        if (!here) return false;
        const int32_t* block = fabric.template network<int32_t>(heap.notify_rail(parity, node));
        move_counts(
            warp, rank_counts, [&](int item) { return block[local * rank_counts + item]; },
            pass_on);
        if (local != own_local) continue;
        const int32_t* tokens = block + topology.ranks_per_node * rank_counts;
        move_counts(
            warp, layout.channels, [&](int channel) { return tokens[channel]; },
            [&](int channel, int32_t count) { layout.rail(channel, node) = count; });
    }
    warp.template publish<Scope::System>(
        fabric.template peer<uint64_t>(local, heap.notify_node_flag(own_local)), args.epoch);
    return true;
}

// The host reads the totals, and the counts that this warp wrote before, once it sees the ticket.
template <WarpLike W>
EP_FN void tell_host(W& warp, const NotifyArgs& args) {
    if (!args.host_totals) return;
    warp.lanes(1, [&](int) {
        const uint64_t earlier = args.host_totals->ticket;
        *args.host_totals = args.layout.totals();
        args.host_totals->ticket = earlier;
    });
    warp.template publish<Scope::System>(&args.host_totals->ticket, args.ticket);
}

// Everything that dispatch needs to know: where each source rank's rows start at each expert and
// how many rows each ring will carry.
template <WarpLike W, FabricLike<W> F>
EP_FN bool receive_counts(W& warp, F& fabric, const NotifyArgs& args) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int parity = args.epoch & 1;
    for (int first = 0; first < topology.ranks_per_node; first += 32) {
        const int count = lanes_from(first, topology.ranks_per_node);
        const bool here = warp.wait_all(Wait::NotifyNode, count, [&](int lane) {
            const size_t flag = heap.notify_node_flag(first + lane);
            return WaitCondition{
                W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag)), args.epoch,
                topology.rank(topology.node_of(args.rank), first + lane)};
        });
        if (!here) return false;
    }
    const int world = layout.world(), local_experts = layout.local_experts(),
              channels = layout.channels;
    auto told_by = [&](int rank) -> const int32_t* {
        return fabric.template own<int32_t>(heap.notify_node(parity, rank));
    };
    // rank (or node) after rank, channel after channel
    const int received_rows = scan_counts(
        warp, world * channels,
        [&](int number) { return told_by(number / channels)[local_experts + number % channels]; },
        [&](int number, int count, int start) {
            layout.received(number % channels, number / channels) = count;
            layout.received_start(number % channels, number / channels) = start;
        });
    int rail_rows = 0;
    if (topology.nodes > 1) {
        rail_rows = scan_counts(
            warp, topology.nodes * channels,
            [&](int number) {
                const int node = number / channels;
                return node == topology.node_of(args.rank) ? 0
                                                           : layout.rail(number % channels, node);
            },
            [&](int number, int, int start) {
                layout.rail_start(number % channels, number / channels) = start;
            });
    }

    typename W::template PerLane<int> rows;
    int expert_rows = 0;
    for (int first = 0; first < local_experts; first += 32) {
        const int lanes = lanes_from(first, local_experts);
        warp.lanes(lanes, [&](int lane) {
            int count = 0;
            for (int rank = 0; rank < world; ++rank) count += told_by(rank)[first + lane];
            layout.expert_count(first + lane) = count;
            rows[lane] = args.expert_capacity > 0
                             ? args.expert_capacity
                             : static_cast<int>(align_up(count, args.expert_alignment));
        });
        warp.lanes(lanes, [&](int lane) { args.tell_expert(first + lane, rows[lane]); });
        const int total = warp.exclusive_scan(lanes, rows);
        warp.lanes(lanes, [&](int lane) {
            int start = expert_rows + rows[lane];
            layout.expert_start(first + lane) = start;
            for (int rank = 0; rank < world; ++rank) {
                layout.expert_base(rank)[first + lane] = start;
                start += told_by(rank)[first + lane];
            }
        });
        expert_rows += total;
    }
    warp.lanes(1, [&](int) {
        layout.expert_start(local_experts) = expert_rows;
        layout.totals().received_rows = received_rows;
        layout.totals().expert_rows = expert_rows;
        layout.totals().rail_rows = rail_rows;
        layout.totals().overflow = 0;
        const uint32_t epoch = args.layout_epoch();
        if (layout.totals().epoch != epoch) layout.totals().epoch = epoch;  // or others may read it
    });
    tell_host(warp, args);
    return true;
}

// The roles of the exchange: one sends to each other node, one relays to each rank of the own node.
// The last relays to its own rank, which it then serves as receiver: it waits for this rank's rail
// before it waits for others, and so does not blame them. A warp that has several roles runs them
// in this order: no role waits for a later one, here or on another rank.
EP_HD int num_exchange_roles(const Topology& topology) {
    return topology.nodes - 1 + topology.ranks_per_node;
}

// False: a wait ended badly, and the warp must return.
template <WarpLike W, FabricLike<W> F>
EP_FN bool run_exchange_role(W& warp, F& fabric, const NotifyArgs& args, int role) {
    const Topology& topology = args.heap.topology;
    const int other_nodes = topology.nodes - 1, ranks = topology.ranks_per_node;
    if (role < other_nodes) {
        send_counts(warp, fabric, args, role + (role >= topology.node_of(args.rank)));
        return true;
    }
    role -= other_nodes;
    const int local = (topology.local_of(args.rank) + 1 + role) % ranks;  // this rank is last
    if (!relay_counts(warp, fabric, args, local)) return false;
    return role < ranks - 1 || receive_counts(warp, fabric, args);
}

}  // namespace ep
