#pragma once

#include "core/args.h"
#include "exec/warp.h"
#include "fabric/fabric.h"
#include "protocol/count_tables.h"
#include "protocol/layout.h"

namespace ep {

// Notify: all ranks exchange the counts that dispatch needs. Counts travel as rows do, along the
// rail to a node and inside it to a rank. A node gets one block (the counts of each of its ranks,
// then tokens per channel); a rank gets its block of that (rows per local expert, then per
// channel).
//
// Blocks are double-buffered by the epoch's parity. That suffices: a rank that has finished epoch e
// has heard from all ranks that they entered e, so all have finished reading e - 1.

// Counts that this rank sends to another: rows for each of its experts, then rows per channel.
EP_FN int32_t rank_count(const Layout& layout, int rank, int item) {
    const int local_experts = layout.local_experts();
    return item < local_experts ? layout.expert_counts(layout.channels)[rank * local_experts + item]
                                : layout.rank_tokens(item - local_experts, rank);
}

// Sends this rank's counts for the ranks of another node, along the rail.
template <WarpLike W, FabricLike<W> F>
EP_FN void send_counts(W& warp, F& fabric, const NotifyArgs& args, int node) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int own_node = topology.node_of(args.rank);
    const int parity = args.epoch & 1;
    const int rank_counts = static_cast<int>(heap.rank_counts());
    int32_t* block = fabric.template network<int32_t>(heap.notify_staging(parity, node));
    auto pass_on = [&](int local, int item, int32_t count) {
        block[local * rank_counts + item] = count;
    };
    move_table(
        warp, topology.ranks_per_node, rank_counts,
        [&](int local, int item) { return rank_count(layout, topology.rank(node, local), item); },
        pass_on);
    move_table(
        warp, 1, layout.channels,
        [&](int, int channel) { return layout.node_tokens(channel, node); },
        [&](int, int channel, int32_t count) { pass_on(topology.ranks_per_node, channel, count); });
    const int there = topology.rank(node, topology.local_of(args.rank));
    fabric.put_to(warp, heap.channels, there, heap.notify_rail(parity, own_node),
                  heap.notify_staging(parity, node), heap.node_block_bytes());
    fabric.signal_to(warp, heap.channels, there, heap.notify_rail_flag(own_node), args.epoch - 1,
                     args.epoch);
}

// Sends the rank `local` of this node the counts that it needs from a group of nodes: this rank's
// own, and what arrived on its rail.
template <WarpLike W, FabricLike<W> F>
EP_FN bool relay_counts(W& warp, F& fabric, const NotifyArgs& args, int local, int group) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int own_node = topology.node_of(args.rank);
    const int own_local = topology.local_of(args.rank);
    const int parity = args.epoch & 1;
    const int rank_counts = static_cast<int>(heap.rank_counts());
    const int first = group * Heap::kRelayedNodes, nodes = lanes_from(first, topology.nodes);
    if (topology.nodes > 1) {
        const bool here = warp.wait_all(Wait::NotifyRail, nodes, [&](int lane) {
            const int node = first + lane;
            if (node == own_node) return nothing_to_wait_for();
            return WaitCondition{
                fabric.template acquire_signal<W>(heap.channels, heap.notify_rail_flag(node)),
                args.epoch, topology.rank(node, own_local)};
        });
        if (!here) return false;
    }
    const int32_t* blocks = fabric.template network<int32_t>(heap.notify_rail(parity, first));
    const int block = static_cast<int>(heap.node_block_bytes() / sizeof(int32_t));
    int32_t* targets = fabric.template peer<int32_t>(
        local, heap.notify_node(parity, topology.rank(first, own_local)));
    const int stride =
        topology.ranks_per_node * static_cast<int>(heap.rank_block_bytes() / sizeof(int32_t));
    move_table(
        warp, nodes, rank_counts,
        [&](int node, int item) {
            if (first + node == own_node)
                return rank_count(layout, topology.rank(own_node, local), item);
            return blocks[node * block + local * rank_counts + item];
        },
        [&](int node, int item, int32_t count) { targets[node * stride + item] = count; });
    warp.template publish<Scope::System>(
        fabric.template peer<uint64_t>(local, heap.notify_node_flag(own_local, group)), args.epoch);
    return true;
}

// Copies the totals to host memory, then publishes the ticket. A host that sees it also sees all
// counts that this warp wrote before. The copy's ticket is 0, as in every layout.
template <WarpLike W>
EP_FN void report_to_host(W& warp, const NotifyArgs& args) {
    Layout::Totals* const host = args.report.totals;
    if (!host) return;
    warp.lanes(1, [&](int) { *host = args.layout.totals(); });
    warp.template publish<Scope::System>(&host->ticket, args.report.ticket);
}

// Assigns rows to this rank's experts, one after the other, a lane each: count_of(lane, expert)
// returns how many an expert gets, place(lane, expert, start) is called with where they start.
// Returns where the last one's end, or -1 if a count is negative or int32 cannot hold a sum.
template <WarpLike W, class CountOf, class Place>
EP_FN int place_experts(W& warp, const NotifyArgs& args, CountOf&& count_of, Place&& place) {
    const Layout& layout = args.layout;
    const int local_experts = layout.local_experts();
    PerLane<W, int> rows, sign;
    int expert_rows = 0;
    uint32_t wrong = 0;
    for (int first = 0; first < local_experts; first += 32) {
        const int lanes = lanes_from(first, local_experts);
        warp.lanes(lanes, [&](int lane) {
            const int count = count_of(lane, first + lane);
            layout.expert_count(first + lane) = count;
            rows[lane] = args.expert_capacity > 0
                             ? args.expert_capacity
                             : static_cast<int>(align_up(count, args.expert_alignment));
            args.set_expert_rows(first + lane, rows[lane]);
            sign[lane] = count | rows[lane];
        });
        const int total = warp.exclusive_scan(lanes, rows);
        warp.lanes(lanes, [&](int lane) {
            const int start = sum_of(expert_rows, rows[lane]);
            layout.expert_start(first + lane) = start;
            place(lane, first + lane, start);
            sign[lane] |= start;
        });
        expert_rows = sum_of(expert_rows, total);
        wrong |= warp.ballot(lanes, [&](int lane) { return (sign[lane] | expert_rows) < 0; });
    }
    return wrong ? -1 : expert_rows;
}

// Computes where the rows of each rank start: expert after expert, rank after rank. Returns where
// they end. For few ranks: a lane holds all counts of an expert and reads nothing that it wrote.
template <WarpLike W, class CountFrom>
EP_FN int place_rows_of_few(W& warp, const NotifyArgs& args, CountFrom&& count_from) {
    const Layout& layout = args.layout;
    const int world = layout.world();
    PerLane<W, Counts> counts;
    return place_experts(
        warp, args,
        [&](int lane, int expert) {
            int count = 0, sign = 0;
            for (int rank = 0; rank < Counts::kSize; ++rank)
                counts[lane].values[rank] = rank < world ? count_from(rank, expert) : 0;
            for (const int32_t value : counts[lane].values) {
                count = sum_of(count, value);
                sign |= value | count;
            }
            return sign < 0 ? -1 : count;
        },
        [&](int lane, int expert, int start) {
            for (int rank = 0; rank < Counts::kSize; ++rank) {
                if (rank < world) layout.expert_base(rank)[expert] = start;
                start = sum_of(start, counts[lane].values[rank]);
            }
        });
}

// Does the same for any number of ranks: first without padding, then it moves all ranks' rows of an
// expert as far as the expert's.
template <WarpLike W, class CountFrom>
EP_FN int place_rows_of_many(W& warp, const NotifyArgs& args, CountFrom&& count_from) {
    const Layout& layout = args.layout;
    const int world = layout.world(), local_experts = layout.local_experts();
    const int all_rows = scan_table(
        warp, local_experts, world, [&](int expert, int rank) { return count_from(rank, expert); },
        [&](int expert, int rank, int, int start) { layout.expert_base(rank)[expert] = start; });
    if (all_rows < 0) return -1;
    int32_t* bases = layout.expert_base(0);
    const int expert_rows = place_experts(
        warp, args,
        [&](int, int expert) {
            const int end = expert + 1 < local_experts ? bases[expert + 1] : all_rows;
            return end - bases[expert];
        },
        [](int, int, int) {});
    // Rank 0 comes last: its start without padding is needed to move the others.
    const int last = world - 1;
    move_table(
        warp, world, local_experts,
        [&](int rank, int expert) {
            return sum_of(layout.expert_base(last - rank)[expert],
                          layout.expert_start(expert) - bases[expert]);
        },
        [&](int rank, int expert, int32_t start) {
            layout.expert_base(last - rank)[expert] = start;
        });
    return expert_rows;
}

// Fails the call for counts that no rank can have. Blames the rank of the largest count that
// count_of(source, item) reads; a negative one is larger than all others.
template <WarpLike W, class CountOf, class RankOf>
EP_FN void reject_counts(W& warp, const NotifyArgs& args, Wait wait, int sources, int items,
                         CountOf&& count_of, RankOf&& rank_of) {
    mark_unknown(warp, args);
    PerLane<W, int> peer;
    PerLane<W, uint32_t> most;
    warp.lanes(1, [&](int lane) {
        most[lane] = 0;
        for (int source = 0; source < sources; ++source) {
            for (int item = 0; item < items; ++item) {
                const auto count = static_cast<uint32_t>(count_of(source, item));
                if (source + item > 0 && count <= most[lane]) continue;
                most[lane] = count;
                peer[lane] = rank_of(source);
            }
        }
    });
    warp.fail(Outcome::Mismatch, wait,
              WaitCondition{warp.broadcast(most, 0), 0, warp.broadcast(peer, 0)});
}

// Waits for the counts of all ranks and computes what dispatch needs: where each source rank's rows
// start at each expert, and how many rows each ring carries. Returns false if it fails.
template <WarpLike W, FabricLike<W> F>
EP_FN bool receive_counts(W& warp, F& fabric, const NotifyArgs& args) {
    const Layout& layout = args.layout;
    const Heap& heap = args.heap;
    const Topology& topology = heap.topology;
    const int parity = args.epoch & 1;
    const int ranks = topology.ranks_per_node;
    for (int group = 0; group < heap.relays(); ++group) {
        for (int first = 0; first < ranks; first += 32) {
            const bool here =
                warp.wait_all(Wait::NotifyNode, lanes_from(first, ranks), [&](int lane) {
                    const size_t flag = heap.notify_node_flag(first + lane, group);
                    return WaitCondition{
                        W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag)),
                        args.epoch, topology.rank(topology.node_of(args.rank), first + lane)};
                });
            if (!here) return false;
        }
    }
    const int world = layout.world(), local_experts = layout.local_experts(),
              channels = layout.channels;
    // Rows that this rank forwards: node after node, channel after channel.
    int rail_rows = 0;
    if (topology.nodes > 1) {
        const int32_t* tokens = fabric.template network<int32_t>(heap.notify_rail(parity, 0)) +
                                topology.ranks_per_node * heap.rank_counts();
        const int block = static_cast<int>(heap.node_block_bytes() / sizeof(int32_t));
        auto rail_count_from = [&](int node, int channel) -> int {
            if (node == topology.node_of(args.rank)) return 0;
            return tokens[node * block + channel];
        };
        rail_rows = scan_table(warp, topology.nodes, channels, rail_count_from,
                               [&](int node, int channel, int count, int start) {
                                   layout.rail(channel, node) = count;
                                   layout.rail_start(channel, node) = start;
                               });
        if (rail_rows < 0) {
            reject_counts(
                warp, args, Wait::NotifyRail, topology.nodes, channels, rail_count_from,
                [&](int node) { return topology.rank(node, topology.local_of(args.rank)); });
            return false;
        }
    }

    // Rows that arrive: rank after rank, channel after channel.
    const size_t blocks = heap.notify_node(parity, 0);
    const int block = static_cast<int>(heap.rank_block_bytes() / sizeof(int32_t));
    auto count_from = [&](int rank, int item) -> int {
        return fabric.template own<int32_t>(blocks)[rank * block + item];
    };
    const int received_rows = scan_table(
        warp, world, channels,
        [&](int rank, int channel) { return count_from(rank, local_experts + channel); },
        [&](int rank, int channel, int count, int start) {
            layout.received(channel, rank) = count;
            layout.received_start(channel, rank) = start;
        });
    const int expert_rows = world <= Counts::kSize ? place_rows_of_few(warp, args, count_from)
                                                   : place_rows_of_many(warp, args, count_from);
    if ((received_rows | expert_rows) < 0) {
        reject_counts(warp, args, Wait::NotifyNode, world, local_experts + channels, count_from,
                      [](int rank) { return rank; });
        return false;
    }
    warp.lanes(1, [&](int) {
        layout.expert_start(local_experts) = expert_rows;
        layout.totals().received_rows = received_rows;
        layout.totals().expert_rows = expert_rows;
        layout.totals().rail_rows = rail_rows;
        layout.totals().overflow = 0;
        const uint32_t epoch = args.layout_epoch();
        if (layout.totals().epoch != epoch)
            layout.totals().epoch = epoch;  // only if it differs: others may read it
    });
    report_to_host(warp, args);
    return true;
}

// Roles of the exchange: one sends to each other node, one relays the counts of a group of nodes to
// each other rank of this node. The last one relays to its own rank, then receives: it waits for
// this rank's rail before it waits for others, and so does not blame them. A warp with several
// roles runs them in this order: no role waits for a later one, here or on another rank.
EP_HD int num_exchange_roles(const Heap& heap) {
    const Topology& topology = heap.topology;
    return topology.nodes - 1 + (topology.ranks_per_node - 1) * heap.relays() + 1;
}

// Returns false if a wait failed and the warp must return.
template <WarpLike W, FabricLike<W> F>
EP_FN bool run_exchange_role(W& warp, F& fabric, const NotifyArgs& args, int role) {
    const Topology& topology = args.heap.topology;
    const int other_nodes = topology.nodes - 1, other_ranks = topology.ranks_per_node - 1;
    if (role < other_nodes) {
        send_counts(warp, fabric, args, role + (role >= topology.node_of(args.rank)));
        return true;
    }
    role -= other_nodes;
    const int own = topology.local_of(args.rank), relays = args.heap.relays();
    // the last role relays the counts of all groups to its own rank
    const bool is_last = role == other_ranks * relays;
    const int local = is_last ? own : (own + 1 + role % other_ranks) % topology.ranks_per_node;
    for (int group = is_last ? 0 : role / other_ranks; group < relays; ++group) {
        if (!relay_counts(warp, fabric, args, local, group)) return false;
        if (!is_last) return true;
    }
    return receive_counts(warp, fabric, args);
}

}  // namespace ep
