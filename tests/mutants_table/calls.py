"""Dispatch and combine within a node."""

from mutants_table.mutant import MET, RANK, SYSTEM, Table

GUESSED = "return rows >= min_rows …;"
PUBLISH_TAILS = "«warp.template publish_lanes<Scope::System>( lanes_from(first, peers), …});»"
NVL_CREDIT = "return {W::template acquire<Scope::System>(rings.nvl_out_head…};"
NVL_ROW = "return {W::template acquire<Scope::System>(rings.nvl_in_tail…};"
FORWARDER = "warp.template credit<Scope::Rank>(&rings.rdma_in(node).next, ++next);"
SUMS = "warp.template publish<Scope::Rank>(summed, ++done);"
NVL_SENDER = "warp.template publish<Scope::System>(rings.nvl_out_tail(batch.node, batch.peer), next);"
RELAY = "warp.template publish<Scope::System>( fabric.template peer<uint64_t>…args.epoch);"
COUNTS = "return WaitCondition{ W::template acquire<Scope::System>(fabric.template own…};"

MUTANTS: Table = {
    ("protocol/combine.h", "p2p"): [
        ("sums for others: not forgotten", "if (out.next == out.end) reset_sums(rings, args, rank);"),
        (
            "combine_forwarder: partial rows are not waited for",
            "while (!warp.met(format.topk, has_arrived)) {…if (absent)…; }",
            "(void)has_arrived;",
        ),
        ("combine_nvl_sender: the rank's scope", NVL_SENDER, SYSTEM, RANK),
        ("combine_nvl_sender: a credit", NVL_SENDER, "publish<", "credit<"),
        ("combine_nvl_sender: sums are not waited for", "if (!wait_for_sums(…return false;"),
        (
            "wait_for_sums: those of one warp are waited for",
            "return sums_done<W>(rings, args, rank, part, end);",
            "part",
            "0",
        ),
        (
            "combine_forwarder: a credit for a packed row",
            "warp.template publish<Scope::Rank>(&rings.rdma_out…;",
            "publish<",
            "credit<",
        ),
    ],
    ("protocol/combine_receiver.h", "p2p"): [
        ("sums for this rank: not forgotten", "if (is_last) …reset_sums(rings, args, args.rank); });"),
        ("combine_receiver: partial rows are not waited for", "return here || …;", "return true;"),
        ("combine_receiver: own sums are not waited for", "if (!args.sums) return nothing_to_wait_for();", MET),
        ("combine_receiver: slots are taken up out of order", "if (…may_assign)) return false;"),
        ("combine_receiver: slots are freed out of order", "if (!kAlone && …is_next)) return false;"),
        (
            "combine_receiver: who waits for a row does not tell of free slots",
            "if (!here || (kAlone…}",
            "!here || (kAlone",
            "(kAlone",
        ),
        (
            "combine_receiver: a credit for taking up",
            "warp.template publish<Scope::Rank>(&order.assigned, …;",
            "publish<",
            "credit<",
        ),
        (
            "combine_receiver: a credit for freeing",
            "warp.template publish<Scope::Rank>(&order.freed, …;",
            "publish<",
            "credit<",
        ),
        (
            "combine_receiver: the order by a plain load",
            "return WaitCondition{W::template acquire<Scope::Rank>(&tokens)…};",
            "W::template acquire<Scope::Rank>",
            "*",
        ),
        ("combine_receiver: all sum own rows in one slot", "own_sum = sum_of_own…dst_row);", "receiver,", "0,"),
    ],
    ("launch/cuda/kernels.h", "p2p"): [
        ("a wrong guess: dispatched", "if (is_skipped(args) || !begins…return;", "is_skipped(args) || ", ""),
        ("a wrong guess: ended", "if (!params.ends_call || is_skipped…return;", "if (!params.ends_call) return;"),
        (
            "a wrong guess: own rows copied",
            "if (…is_skipped(args) || is_aborted(rank)) return;",
            "is_skipped(args)",
            "false",
        ),
        ("exchange_counts: a credit", "warp.template publish<Scope::Rank>(&progress…;", "publish<", "credit<"),
    ],
    ("core/args.h", "p2p"): [
        ("a guess: too much room", GUESSED, "rows >= min_rows", "true"),
        ("a guess: too little room", GUESSED, "rows <= max_rows", "true"),
        ("a guess: small tables", GUESSED, "totals.received_rows <= max_received", "true"),
        ("a guess: small tables of the rail", GUESSED, "totals.rail_rows <= max_rail", "true"),
    ],
    ("core/args.h", "nvshmem"): [
        (
            "begins_call: the dispatch of a plan does not",
            "return layout.is_planned || !fills_tables;",
            "return !fills_tables;",
        ),
    ],
    ("core/args.h", "queue"): [
        ("kind: that of a plan is any", "if (layout.is_planned) return is_combine ? …;"),
    ],
    ("launch/cuda/fused_dispatch.h", "p2p"): [
        ("PendingCounts: relaxed", "if (rows::lane_id() == 0) seen = …;", "load_acquire_gpu", "load_relaxed_sys"),
        ("PendingCounts: lanes do not meet behind", "«__syncwarp();»  // extends lane 0's acquire"),
        (
            "whole dispatch: receivers do not wait for counts",
            "if (counts.wait(w)) receiver…share);",
            "if (counts.wait(w)) ",
            "",
        ),
    ],
    ("protocol/dispatch.h", "p2p"): [
        (
            "nvl_sender: own rows are placed before the counts are there",
            "if (go_on && counts.wait(warp)) …;",
            "if (go_on && counts.wait(warp))",
            "",
        ),
        (
            "write_own_rows: rows of the parts before are not counted",
            "received += popcount( tokens_to(warp, args, token, some_end, …}));",
        ),
        (
            "nvl_sender: a plan's tokens for other nodes alone are served",
            "return topology.node_of(rank) == node && …;",
            "== node",
            "!= node",
        ),
        (
            "forwarder: rows are not waited for",
            "return rdma_row<W>(rings, node, …;",
            "return WaitCondition{~uint64_t{0}, rings.rdma_in(node).next + 1, -1};",
        ),
        ("take_slots: no wait for room", "if (!room && …credit)) return false;", "(void)room;"),
        ("receiver: credit within the rank", "warp.template credit<Scope::System>(rings.nvl_in_head…;", SYSTEM, RANK),
        (
            "rdma_sender: a credit for a packed row",
            "«warp.template publish_lanes<Scope::Rank>(count, …});»",
            "publish_lanes<",
            "credit_lanes<",
        ),
        ("forwarder: no credit", FORWARDER, FORWARDER, "++next;"),
    ],
    ("core/layout.h", "p2p"): [
        (
            "first_token: a plan's channels are as long as any",
            "return is_planned ? planned_first_token(channel) : even_first_token(rank, channel);",
            "return even_first_token(rank, channel);",
        ),
    ],
    ("protocol/tokens.h", "p2p"): [
        ("for_each_token: of 32 tokens of a plan the first alone", "left &= left - 1;", "left &= left - 1", "left = 0"),
    ],
    ("protocol/ring.h", "p2p"): [
        ("publish_tails: the rank's scope", PUBLISH_TAILS, SYSTEM, RANK),
        ("publish_tails: a credit", PUBLISH_TAILS, "publish_lanes", "credit_lanes"),
        (
            "publish_heads: the rank's scope",
            "«warp.template credit_lanes<Scope::System>( lanes_from(first, peers), …});»",
            SYSTEM,
            RANK,
        ),
        ("nvl_credit: the rank's scope", NVL_CREDIT, SYSTEM, RANK),
        ("nvl_credit: a plain load", NVL_CREDIT, "W::template acquire<Scope::System>", "*"),
        ("rdma_credit: no wait for room", "return {rings.template acquire_rdma_head…};", MET),
        ("open_nvl_rings: not run empty", "if (out(lane).slot_bytes == slot_bytes) return nothing_to_wait_for();", MET),
        ("nvl_row: the rank's scope", NVL_ROW, SYSTEM, RANK),
        ("nvl_row: a plain load", NVL_ROW, "W::template acquire<Scope::System>", "*"),
    ],
    ("protocol/intra_rank.h", "p2p"): [
        ("sum_rows_of: a credit for a sum", SUMS, "publish<", "credit<"),
        ("sum_rows_of: a sum is told too early", SUMS, "++done", "++done + 1"),
    ],
    ("protocol/coordinators.h", "p2p"): [
        (
            "follow: a plain load",
            "moved[lane] = W::template acquire<Scope::Rank>(…;",
            "W::template acquire<Scope::Rank>",
            "*",
        ),
    ],
    ("protocol/notify.h", "p2p"): [
        ("relay_counts: the rail is not waited for", "return WaitCondition{ fabric.template acquire_signal…};", MET),
        ("receive_counts: the node is not waited for", COUNTS, MET),
        ("relay_counts: the rank's scope", RELAY, SYSTEM, RANK),
        ("relay_counts: a credit", RELAY, "publish<", "credit<"),
        ("receive_counts: the rank's scope", COUNTS, SYSTEM, RANK),
        ("receive_counts: a plain load", COUNTS, "W::template acquire<Scope::System>", "*"),
    ],
}
