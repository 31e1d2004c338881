"""The low-latency mode."""

from mutants_table.mutant import MET, RANK, SYSTEM, Table

LL_ARRIVE = "if (lane_id() == 0) before = ptx::fetch_add_acq_rel_gpu(counter, n);"
LL_ACQUIRE = "return W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag));"
LL_TAG = "tag[lane] = W::template acquire<Scope::System>(flag);"
LL_SIGNAL = "warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);"
LL_PUBLISH = "warp.template publish_lanes<Scope::System>(topk * tags, …});"

MUTANTS: Table = {
    ("exec/device/device_warp.h", "low_latency"): [
        ("arrive: writes are not finished", "«finish_writes();» uint64_t before = 0;"),
        ("arrive: relaxed", LL_ARRIVE, "fetch_add_acq_rel_gpu", "fetch_add_sys"),
        ("arrive: lanes do not meet behind", LL_ARRIVE + " «__syncwarp();»"),
        ("lines: not waited for", "if (seen < all.observed) all.observed = seen;", "(void)seen;"),
        (
            "transpose: one's own bits twice",
            "bits.value = lane_id() & size ? …;",
            "(other & low) << size",
            "(bits.value & low) << size",
        ),
    ],
    ("launch/cuda/low_latency_kernels.h", "low_latency"): [
        ("count_half: the number of the next call to be sent", "number = *counted;"),
        ("count_half: no number is kept for the receiving half", "if (enters) warp.lanes(…);"),
    ],
    ("protocol/low_latency.h", "low_latency"): [
        ("acquire_flag: the rank's scope", LL_ACQUIRE, SYSTEM, RANK),
        ("acquire_flag: a plain load", LL_ACQUIRE, "W::template acquire<Scope::System>", "*"),
        (
            "end_receiving: credit within the rank",
            "warp.template credit_lanes<Scope::System>(lanes, …});",
            SYSTEM,
            RANK,
        ),
        ("wait_tags: the rank's scope", LL_TAG, SYSTEM, RANK),
        ("wait_tags: a plain load", LL_TAG, "W::template acquire<Scope::System>", "*"),
        ("publish_tags: the rank's scope", LL_PUBLISH, SYSTEM, RANK),
        ("publish_tags: a credit", LL_PUBLISH, "publish_lanes", "credit_lanes"),
    ],
    ("protocol/low_latency.h", "low_latency_nvshmem low_latency_nccl"): [
        (
            "signal_rows: a channel's warps are not waited for",
            "if (!is_last(warp, joins…;",
            "is_last(warp, joins, sharing);",
        ),
        ("need_put_rows: not waited for", "return {acquire_flag<W>(…};", MET),
        ("credit_some: a call too many to unmapped ranks", "call.fabric.credit_each(…;", "to)", "to + 2)"),
        ("releases_last: also what has not been received", "return last && …;", "== last", "<= last"),
        ("released_last: never", "return call.previous() && *call.word(credited) …;", "(void)credited; return false;"),
        ("release_bank: choices that have left tell it", "to_all = *call.word…;", "> call.number", "< 0"),
        ("release_bank: what choices told is not made up for", "from = *call.word(heap.credited(call.bank));"),
    ],
    ("protocol/low_latency.h", "low_latency_nccl low_latency_queue"): [
        ("signal_rows: a signal that was left out is not made up for", "*call.word(signalled) = call.number;"),
        (
            "signal_rows: ranks that are put rows are not told",
            "return flags > 1 || …;",
            " || puts_rows(call, rank)",
            "",
        ),
    ],
    ("protocol/low_latency_combine.h", "low_latency_nvshmem low_latency_nccl"): [
        ("combine: rows that are put are not waited for", "if (!call.masking() && !wait_rows_put…return false;"),
    ],
    ("protocol/low_latency_combine.h", "low_latency"): [
        (
            "combine: rows are not waited for",
            "if (!wait_tags(warp, call, format.topk…return false;",
            "(void)sent, (void)from;",
        ),
    ],
    ("core/low_latency_heap.h", "low_latency_nvshmem low_latency_nccl"): [
        (
            "staged_part: sums for two ranks share a slot",
            "return staged_parts_ + slot(sums_at_expert …;",
            "(bank, rank, token)",
            "(bank, 0, token)",
        ),
        (
            "need_release: a rank that has sent has received all before",
            "return sent() < 2 ? …;",
            "return sent() < 1 ? 0 : sent() - 1;",
        ),
    ],
    ("protocol/low_latency_mask.h", "low_latency"): [
        (
            "is_first_to_mask: both of two that wait for each other",
            "return …(claim_on(call, rank)) == claim;",
            "return true;",
        ),
        ("is_first_to_mask: nobody claims", "W::template compare_exchange<Scope::System>(claim_on(call, rank), 0, …;"),
        ("mask_ranks: claims of a rank that ends stay", "if ((silent & ~beaten) >> lane & 1) take_claim…;"),
        ("mask_ranks: a rank goes on that is taken for dead", "if (cut_off) return end_by…;"),
        ("mask_ranks: nobody is told why", "notify(silent, MaskReason::Silent);", "notify(silent, MaskReason::Asked);"),
        ("decide_membership: lanes do not meet", "warp.lanes(lanes, [](int) {});"),
        (
            "run_halves: sends into a bank that is not released",
            "if (!may_send(warp, call, team)) return Ended::Failed;",
        ),
        ("run_halves: a layout that was given up", "if (!has_layout(warp, call, team)) return Ended::Failed;"),
    ],
    ("fabric/cuda/p2p_fabric.h", "low_latency"): [
        ("p2p signal_to of low latency: the rank's scope", LL_SIGNAL, SYSTEM, RANK),
        ("p2p signal_to of low latency: a credit", LL_SIGNAL, "publish<", "credit<"),
    ],
    ("protocol/low_latency_dispatch_receive.h", "low_latency"): [
        ("dispatch: choices are not waited for", "if (!may_receive(warp, call, team)) return false;"),
        ("dispatch: rows are not waited for", "if (!wait_tags(…return false;", "(void)slots, (void)tags, (void)from;"),
        ("dispatch: a host that waits gets no report", "if (host) warp.template publish…;"),
    ],
    ("protocol/low_latency_dispatch_receive.h", "low_latency_nvshmem low_latency_nccl"): [
        ("dispatch: rows that are put are not waited for", "if (!wait_rows_put(warp, call, 1, 1, rank)) return false;"),
    ],
    ("protocol/low_latency_words.h", "low_latency"): [
        ("dispatch: words are not waited for", "if (i >= count || words[i] >> 32 == …;", "continue;"),
    ],
    ("protocol/low_latency_lines_receive.h", "low_latency"): [
        ("flat rows: a token counts itself", "if (word == last) bits &= …;", "{1}", "{2}"),
        ("flat rows: unused ones are not marked", "if (bytes) warp.zero(args.recv_weights + …;"),
    ],
    ("exec/device/lines.h", "rows"): [
        (
            "sums of lines: weights of other rows",
            "sums.add(rows[row], weight_of…;",
            "own_weight, lane",
            "own_weight, 0",
        ),
    ],
    ("exec/device/lines.h", "low_latency"): [
        (
            "lines: the tag is stored apart",
            "if (kLinesAtOnce * group < left) ptx::store_line…;",
            "for (const bool tag : {true, false}) { if (kLinesAtOnce * group < left && holds_tag() == tag) "
            "ptx::store_line(lines + group * kGroupBytes, units[group]); __syncwarp(); }",
        ),
    ],
    ("exec/device/bulk.h", "rows"): [
        (
            "sums to lines: from the row's first byte",
            "for_each_piece<kStep, CacheHint::EvictFirst>(own_part…;",
            "own_part",
            "own_src",
        ),
    ],
}
