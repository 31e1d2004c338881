"""Dispatch and combine within a node."""

from mutants_table.mutant import (
    COMBINE,
    COORDINATORS,
    DISPATCH,
    KERNELS,
    MET,
    NOTIFY,
    QUEUES,
    RANK,
    RING,
    SYSTEM,
    Mutant,
    changed,
)

FUSED = "launch/cuda/fused_dispatch.h"
ARGS = "core/args.h"
COMBINE_RECEIVER, INTRA_RANK = "protocol/combine_receiver.h", "protocol/intra_rank.h"
FORWARDER_WAITS = """while (!warp.met(format.topk, has_arrived)) {
            const uint32_t absent =
                warp.ballot(format.topk, [&](int lane) { return !is_met(arrived(lane)); });
            if (absent) return warp.broadcast(peer, lowest_lane(absent));
        }"""
REACHED = """return WaitCondition{W::template acquire<Scope::Rank>(&tokens), before + (token - first),
                             args.rank};"""
BEGINS = "if (is_skipped(args) || !begins(params, position, args, number)) return;"
ENDS = "if (!params.ends_call || is_skipped(params.args[position.index])) return;"
PASSES = """if (!has_intra_rank_pass(args) || !args.layout.totals().epoch || is_skipped(args) ||
        is_aborted(rank))
        return;"""
GUESSED = """return rows >= min_rows && rows <= max_rows && totals.received_rows <= max_received &&
               totals.rail_rows <= max_rail;"""
FREED = "warp.template publish<Scope::Rank>(&order.freed, before + freed);"
FREE_SLOTS = """«if (!here || (kAlone && ++batch == args.nvl_batch)) {
            publish_heads(warp, rings, own_node);
            batch = 0;
        }»"""
ASSIGNED = "warp.template publish<Scope::Rank>(&order.assigned, before + (token - first) + 1);"
PUBLISH_TAILS = """«warp.template publish_lanes<Scope::System>(
            lanes_from(first, peers), [&](int lane, auto&& store) {
                OutCursor& out = rings.nvl_out(node, first + lane);
                if (out.published != out.next)
                    store(rings.nvl_out_tail(node, first + lane), out.published = out.next);
            });»"""
PUBLISH_HEADS = """«warp.template credit_lanes<Scope::System>(
            lanes_from(first, peers), [&](int lane, auto&& store) {
                InCursor& in = rings.nvl_in(node, first + lane);
                if (in.published != in.next)
                    store(rings.nvl_in_head(node, first + lane), in.published = in.next);
            });»"""
NVL_CREDIT = """return {W::template acquire<Scope::System>(rings.nvl_out_head(node, peer)) + rings.nvl_slots,
            next + 1, rings.rank_at(rings.args.node(), peer)};"""
NVL_ROW = """return {W::template acquire<Scope::System>(rings.nvl_in_tail(node, peer)), next + 1,
            rings.rank_at(rings.args.node(), peer)};"""
TAKE_SLOTS = "if (!room && !warp.wait_all(Wait::NvlCredit, topk, credit)) return false;"
RECEIVER = "warp.template credit<Scope::System>(rings.nvl_in_head(batch.node, batch.peer), next);"
SENDER = """«warp.template publish_lanes<Scope::Rank>(count, [&](int lane, auto&& store) {
            OutCursor& out = rings.rdma_out(args.other_node(first + lane));
            if (out.next != out.written) store(&out.next, out.written);
        });»"""
FORWARDER = "warp.template credit<Scope::Rank>(&rings.rdma_in(node).next, ++next);"
SUMS = "warp.template publish<Scope::Rank>(summed, ++done);"
NVL_SENDER = "warp.template publish<Scope::System>(rings.nvl_out_tail(batch.node, batch.peer), next);"
COMBINE_FORWARDER = "warp.template publish<Scope::Rank>(&rings.rdma_out(node).next, ++next);"
FOLLOW = "moved[lane] = W::template acquire<Scope::Rank>(cursor(lane));"
RAIL_COUNTS = """return WaitCondition{
                fabric.template acquire_signal<W>(heap.channels, heap.notify_rail_flag(node)),
                args.epoch, topology.rank(node, own_local)};"""
RDMA_CREDIT = """return {rings.template acquire_rdma_head<W>(node) + rings.rdma_slots, next + 1,
            rings.rank_at(node, rings.args.local())};"""
RELAY = """warp.template publish<Scope::System>(
        fabric.template peer<uint64_t>(local, heap.notify_node_flag(own_local, group)), args.epoch);"""
COUNTS = """return WaitCondition{
                        W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag)),
                        args.epoch, topology.rank(topology.node_of(args.rank), first + lane)};"""

MUTANTS = [
    Mutant("sums for others: not forgotten", COMBINE, "if (out.next == out.end) reset_sums(rings, args, rank);"),
    Mutant(
        "sums for this rank: not forgotten",
        "protocol/combine_receiver.h",
        "if (is_last) warp.lanes(1, [&](int) { reset_sums(rings, args, args.rank); });",
    ),
    # ---- a dispatch that is launched ahead
    changed("a wrong guess: dispatched", KERNELS, BEGINS, "is_skipped(args) || ", ""),
    changed("a wrong guess: ended", KERNELS, ENDS, " || is_skipped(params.args[position.index])", ""),
    changed("a wrong guess: own rows copied", KERNELS, PASSES, "is_skipped(args)", "false"),
    changed("a guess: too much room", ARGS, GUESSED, "rows >= min_rows", "true"),
    changed("a guess: too little room", ARGS, GUESSED, "rows <= max_rows", "true"),
    changed("a guess: small tables", ARGS, GUESSED, "totals.received_rows <= max_received", "true"),
    changed("a guess: small tables of the rail", ARGS, GUESSED, "totals.rail_rows <= max_rail", "true"),
    # ---- notify and dispatch as one launch
    changed(
        "exchange_counts: a credit",
        KERNELS,
        "warp.template publish<Scope::Rank>(&progress.notifies(), args.epoch);",
        "publish<",
        "credit<",
    ),
    changed(
        "PendingCounts: relaxed",
        FUSED,
        "if (rows::lane_id() == 0) seen = ptx::load_acquire_gpu(epochs_) >= epoch_;",
        "ptx::load_acquire_gpu(epochs_)",
        "ptx::load_relaxed_sys(epochs_)",
    ),
    Mutant("PendingCounts: lanes do not meet behind", FUSED, "«__syncwarp();»  // extends lane 0's acquire"),
    Mutant(
        "whole dispatch: receivers do not wait for counts",
        FUSED,
        "if (counts.wait(w)) receiver(w, fabric, args, channel, role * share, share);",
        "receiver(w, fabric, args, channel, role * share, share);",
    ),
    Mutant(
        "nvl_sender: own rows are placed before the counts are there",
        DISPATCH,
        """if (go_on && counts.wait(warp))
            write_own_tokens(warp, args, first, placed_from,
                             args.layout.received_start(channel, args.rank));""",
        "write_own_tokens(warp, args, first, placed_from, args.layout.received_start(channel, args.rank));",
    ),
    # ---- calls by a plan
    changed(
        "begins_call: the dispatch of a plan does not",
        ARGS,
        "return layout.is_planned || !fills_tables;",
        "layout.is_planned || ",
        "",
        ("nvshmem",),
    ),
    Mutant(
        "kind: that of a plan is any",
        ARGS,
        """if (layout.is_planned)
            return is_combine ? Sends::Kind::PlannedCombine : Sends::Kind::PlannedDispatch;""",
        programs=QUEUES,
    ),
    Mutant(
        "first_token: a plan's channels are as long as any",
        "core/layout.h",
        "return is_planned ? planned_first_token(channel) : even_first_token(rank, channel);",
        "return even_first_token(rank, channel);",
    ),
    Mutant(
        "write_own_rows: rows of the parts before are not counted",
        DISPATCH,
        """received += popcount(
            tokens_to(warp, args, token, some_end, [&](int rank) { return rank == args.rank; }));""",
    ),
    changed(
        "nvl_sender: a plan's tokens for other nodes alone are served",
        DISPATCH,
        "return topology.node_of(rank) == node && !(rank == args.rank && args.has_intra_rank_pass);",
        "== node",
        "!= node",
    ),
    changed(
        "for_each_token: of 32 tokens of a plan the first alone",
        "protocol/tokens.h",
        "left &= left - 1;",
        "left &= left - 1",
        "left = 0",
    ),
    # ---- NVLink rings
    changed("publish_tails: the rank's scope", RING, PUBLISH_TAILS, SYSTEM, RANK),
    changed("publish_tails: a credit", RING, PUBLISH_TAILS, "publish_lanes", "credit_lanes"),
    changed("publish_heads: the rank's scope", RING, PUBLISH_HEADS, SYSTEM, RANK),
    changed("nvl_credit: the rank's scope", RING, NVL_CREDIT, SYSTEM, RANK),
    changed("nvl_credit: a plain load", RING, NVL_CREDIT, "W::template acquire<Scope::System>", "*"),
    Mutant("rdma_credit: no wait for room", RING, RDMA_CREDIT, MET),
    Mutant(
        "open_nvl_rings: not run empty",
        RING,
        "if (out(lane).slot_bytes == slot_bytes) return nothing_to_wait_for();",
        MET,
    ),
    changed("nvl_row: the rank's scope", RING, NVL_ROW, SYSTEM, RANK),
    changed("nvl_row: a plain load", RING, NVL_ROW, "W::template acquire<Scope::System>", "*"),
    # ---- dispatch
    Mutant(
        "forwarder: rows are not waited for",
        DISPATCH,
        "return rdma_row<W>(rings, node, rings.rdma_in(node).next);",
        "return WaitCondition{~uint64_t{0}, rings.rdma_in(node).next + 1, -1};",
    ),
    Mutant("take_slots: no wait for room", DISPATCH, TAKE_SLOTS, "(void)room;"),
    changed("receiver: credit within the rank", DISPATCH, RECEIVER, SYSTEM, RANK),
    changed("rdma_sender: a credit for a packed row", DISPATCH, SENDER, "publish_lanes<", "credit_lanes<"),
    changed("forwarder: no credit", DISPATCH, FORWARDER, FORWARDER, "++next;"),
    # ---- combine
    Mutant(
        "combine_forwarder: partial rows are not waited for",
        COMBINE,
        FORWARDER_WAITS,
        "(void)has_arrived;",
    ),
    Mutant(
        "combine_receiver: partial rows are not waited for",
        COMBINE_RECEIVER,
        "return here || warp.wait_all(Wait::PartialRow, format.topk, has_arrived);",
        "return true;",
    ),
    changed("combine_nvl_sender: the rank's scope", COMBINE, NVL_SENDER, SYSTEM, RANK),
    changed("combine_nvl_sender: a credit", COMBINE, NVL_SENDER, "publish<", "credit<"),
    Mutant(
        "combine_nvl_sender: sums are not waited for",
        COMBINE,
        "if (!wait_for_sums(warp, rings, args, batch.rank, batch.first + batch.rows)) return false;",
    ),
    Mutant(
        "wait_for_sums: those of one warp are waited for",
        COMBINE,
        "return sums_done<W>(rings, args, rank, part, end);",
        "return sums_done<W>(rings, args, rank, 0, end);",
    ),
    Mutant(
        "combine_receiver: own sums are not waited for",
        COMBINE_RECEIVER,
        "if (!args.sums) return nothing_to_wait_for();",
        "return nothing_to_wait_for();",
    ),
    Mutant(
        "combine_receiver: slots are taken up out of order",
        COMBINE_RECEIVER,
        "if (!warp.wait_all(Wait::ReceiverOrder, 1, may_assign)) return false;",
    ),
    Mutant(
        "combine_receiver: slots are freed out of order",
        COMBINE_RECEIVER,
        "if (!kAlone && !warp.wait_all(Wait::ReceiverOrder, 1, is_next)) return false;",
    ),
    changed(
        "combine_receiver: who waits for a row does not tell of free slots",
        COMBINE_RECEIVER,
        FREE_SLOTS,
        "!here || (kAlone",
        "(kAlone",
    ),
    changed("combine_receiver: a credit for taking up", COMBINE_RECEIVER, ASSIGNED, "publish<", "credit<"),
    changed("combine_receiver: a credit for freeing", COMBINE_RECEIVER, FREED, "publish<", "credit<"),
    changed(
        "combine_receiver: the order by a plain load",
        COMBINE_RECEIVER,
        REACHED,
        "W::template acquire<Scope::Rank>",
        "*",
    ),
    Mutant(
        "combine_receiver: all sum own rows in one slot",
        COMBINE_RECEIVER,
        "own_sum = sum_of_own<T, kWeighted>(warp, rings, args, receiver, received++, dst_row);",
        "own_sum = sum_of_own<T, kWeighted>(warp, rings, args, 0, received++, dst_row);",
    ),
    changed("sum_rows_of: a credit for a sum", INTRA_RANK, SUMS, "publish<", "credit<"),
    changed("sum_rows_of: a sum is told too early", INTRA_RANK, SUMS, "++done", "++done + 1"),
    changed("combine_forwarder: a credit for a packed row", COMBINE, COMBINE_FORWARDER, "publish<", "credit<"),
    # ---- coordinators and notify
    changed("follow: a plain load", COORDINATORS, FOLLOW, "W::template acquire<Scope::Rank>", "*"),
    Mutant("relay_counts: the rail is not waited for", NOTIFY, RAIL_COUNTS, MET),
    Mutant("receive_counts: the node is not waited for", NOTIFY, COUNTS, MET),
    changed("relay_counts: the rank's scope", NOTIFY, RELAY, SYSTEM, RANK),
    changed("relay_counts: a credit", NOTIFY, RELAY, "publish<", "credit<"),
    changed("receive_counts: the rank's scope", NOTIFY, COUNTS, SYSTEM, RANK),
    changed("receive_counts: a plain load", NOTIFY, COUNTS, "W::template acquire<Scope::System>", "*"),
]
