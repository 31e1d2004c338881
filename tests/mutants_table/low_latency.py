"""The low-latency mode."""

from mutants_table.mutant import BULK, LL, MET, P2P, RANK, ROWS, SYSTEM, WARP, Mutant, changed

LOW_LATENCY = "protocol/low_latency.h"
LL_HALVES = "protocol/low_latency_mask.h"
LL_COMBINE, LL_MASK = "protocol/low_latency_combine.h", "protocol/low_latency_mask.h"
LL_DISPATCH, LL_RECEIVE = "protocol/low_latency_dispatch.h", "protocol/low_latency_dispatch_receive.h"
LL_HEAP = "core/low_latency_heap.h"
LL_WORDS, LINES = "protocol/low_latency_words.h", "exec/device/lines.h"
LL_NETWORKS = ("low_latency_nvshmem", "low_latency_nccl")
LL_ARRIVE = "if (lane_id() == 0) before = ptx::fetch_add_acq_rel_gpu(counter, n);"
LL_ACQUIRE = "return W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag));"
LL_CREDIT = """«warp.template credit_lanes<Scope::System>(lanes, [&](int lane, auto&& store) {
        if (call.fabric.maps(first + lane) && names(first + lane))
            store(call.fabric.template at<uint64_t>(first + lane, flag), to);
    });»"""
LL_RELEASES = "return last && *call.word(released) == last;"
LL_TO_ALL = "to_all = *call.word(heap.sent(Args::kKind)) > call.number;"
LL_TAG = "tag[lane] = W::template acquire<Scope::System>(flag);"
LL_SIGNAL = "warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);"
LL_BANK = "if (!may_send(warp, call, team)) return Ended::Failed;"
LL_PUBLISH = """«warp.template publish_lanes<Scope::System>(topk * tags, [&](int lane, auto&& store) {
            if (!(mask >> lane % topk & 1)) return;
            const size_t tag = Piece::tag(piece.number + done + lane / topk);
            store(reinterpret_cast<uint64_t*>(slot_of(lane % topk) + tag), call.tag);
        });»"""
LL_PUT_ROWS = """return {acquire_flag<W>(call.fabric, row_channel(call, number, rank), rank, flag), call.number,
            rank};"""
LL_CHOICES = "if (!may_receive(warp, call, team)) return false;"
LL_TAGS = "if (!wait_tags(warp, call, piece.count, tags, slots, piece.number, from)) return false;"
LL_STORE = """if (kLinesAtOnce * group < left)
                ptx::store_line(lines + group * kGroupBytes, units[group]);"""
LL_STORE_APART = """for (const bool tag : {true, false}) {
                if (kLinesAtOnce * group < left && holds_tag() == tag)
                    ptx::store_line(lines + group * kGroupBytes, units[group]);
                __syncwarp();
            }"""
LL_LINES = "protocol/low_latency_lines_receive.h"
LL_PLACE = "if (word == last) bits &= (uint32_t{1} << token % 32) - 1;"
LL_REPORT = "if (host) warp.template publish<Scope::System>(&host->ticket, args.report.ticket);"
LL_MARK = "if (bytes) warp.zero(args.recv_weights + first * bytes, (end - first) * bytes);"
LL_PARTS = "if (!wait_tags(warp, call, format.topk, sent, slot, i, from)) return false;"

MUTANTS = [
    # ---- the low-latency mode
    Mutant("arrive: writes are not finished", WARP, "«finish_writes();»\n        uint64_t before = 0;", programs=LL),
    changed("arrive: relaxed", WARP, LL_ARRIVE, "fetch_add_acq_rel_gpu", "fetch_add_sys", LL),
    Mutant(
        "arrive: lanes do not meet behind",
        WARP,
        LL_ARRIVE + "\n        «__syncwarp();»",
        programs=LL,
    ),
    changed("acquire_flag: the rank's scope", LOW_LATENCY, LL_ACQUIRE, SYSTEM, RANK, LL),
    changed("acquire_flag: a plain load", LOW_LATENCY, LL_ACQUIRE, "W::template acquire<Scope::System>", "*", LL),
    changed("end_receiving: credit within the rank", LOW_LATENCY, LL_CREDIT, SYSTEM, RANK, LL),
    Mutant(
        "signal_rows: a channel's warps are not waited for",
        LOW_LATENCY,
        "if (!is_last(warp, joins, sharing)) return;",
        "is_last(warp, joins, sharing);",
        LL_NETWORKS,
    ),
    Mutant(
        "signal_rows: a signal that was left out is not made up for",
        LOW_LATENCY,
        "*call.word(signalled) = call.number;",
        programs=("low_latency_nccl", "low_latency_queue"),
    ),
    Mutant(
        "signal_rows: ranks that are put rows are not told",
        LOW_LATENCY,
        "return flags > 1 || call.masking() || puts_rows(call, rank);",
        "return flags > 1 || call.masking();",
        ("low_latency_nccl", "low_latency_queue"),
    ),
    Mutant(
        "combine: rows that are put are not waited for",
        LL_COMBINE,
        "if (!call.masking() && !wait_rows_put(warp, call, format.topk, sent, rank)) return false;",
        programs=LL_NETWORKS,
    ),
    Mutant("need_put_rows: not waited for", LOW_LATENCY, LL_PUT_ROWS, MET, LL_NETWORKS),
    Mutant(
        "credit_some: a call too many to unmapped ranks",
        LOW_LATENCY,
        "«call.fabric.credit_each(warp, first, far, call.heap().channels, flag, from, to);»",
        "call.fabric.credit_each(warp, first, far, call.heap().channels, flag, from, to + 2);",
        LL_NETWORKS,
    ),
    changed(
        "releases_last: also what has not been received", LOW_LATENCY, LL_RELEASES, "== last", "<= last", LL_NETWORKS
    ),
    Mutant(
        "released_last: never",
        LOW_LATENCY,
        "return call.previous() && *call.word(credited) != call.previous();",
        "(void)credited; return false;",
        LL_NETWORKS,
    ),
    changed(
        "staged_part: sums for two ranks share a slot",
        LL_HEAP,
        """return staged_parts_ + slot(sums_at_expert ? slot_of_token(bank, rank, token)
                                                   : slot_of_choice(bank, rank, token, choice));""",
        "(bank, rank, token)",
        "(bank, 0, token)",
        LL_NETWORKS,
    ),
    Mutant(
        "need_release: a rank that has sent has received all before",
        LL_HEAP,
        "return sent() < 2 ? 0 : sent() - 2 + value % 2;",
        "return sent() < 1 ? 0 : sent() - 1;",
        LL_NETWORKS,
    ),
    changed(
        "release_bank: choices that have left tell it", LOW_LATENCY, LL_TO_ALL, "> call.number", "< 0", LL_NETWORKS
    ),
    Mutant(
        "release_bank: what choices told is not made up for",
        LOW_LATENCY,
        "from = *call.word(heap.credited(call.bank));",
        programs=LL_NETWORKS,
    ),
    Mutant(
        "is_first_to_mask: both of two that wait for each other",
        LL_MASK,
        "return W::template acquire<Scope::System>(claim_on(call, rank)) == claim;",
        "return true;",
        LL,
    ),
    Mutant(
        "is_first_to_mask: nobody claims",
        LL_MASK,
        "W::template compare_exchange<Scope::System>(claim_on(call, rank), 0, claim);",
        "",
        LL,
    ),
    Mutant(
        "mask_ranks: claims of a rank that ends stay",
        LL_MASK,
        "if ((silent & ~beaten) >> lane & 1) take_claim_back<W>(call, first + lane);",
        "",
        LL,
    ),
    Mutant(
        "mask_ranks: a rank goes on that is taken for dead",
        LL_MASK,
        "if (cut_off) return end_by(first + lowest_lane(cut_off));",
        "",
        LL,
    ),
    Mutant(
        "mask_ranks: nobody is told why",
        LL_MASK,
        "notify(silent, MaskReason::Silent);",
        "notify(silent, MaskReason::Asked);",
        LL,
    ),
    Mutant("decide_membership: lanes do not meet", LL_MASK, "warp.lanes(lanes, [](int) {});", programs=LL),
    changed("wait_tags: the rank's scope", LOW_LATENCY, LL_TAG, SYSTEM, RANK, LL),
    changed("wait_tags: a plain load", LOW_LATENCY, LL_TAG, "W::template acquire<Scope::System>", "*", LL),
    changed("p2p signal_to of low latency: the rank's scope", P2P, LL_SIGNAL, SYSTEM, RANK, LL),
    changed("p2p signal_to of low latency: a credit", P2P, LL_SIGNAL, "publish<", "credit<", LL),
    Mutant("dispatch: sends into a bank that is not released", LL_DISPATCH, LL_BANK, "", LL),
    changed("publish_tags: the rank's scope", LOW_LATENCY, LL_PUBLISH, SYSTEM, RANK, LL),
    changed("publish_tags: a credit", LOW_LATENCY, LL_PUBLISH, "publish_lanes", "credit_lanes", LL),
    Mutant(
        "both halves: send into a bank that is not released",
        LL_HALVES,
        LL_BANK,
        "",
        LL,
    ),
    Mutant("dispatch: choices are not waited for", LL_RECEIVE, LL_CHOICES, "", LL),
    Mutant(
        "dispatch: rows that are put are not waited for",
        LL_RECEIVE,
        "if (!wait_rows_put(warp, call, 1, 1, rank)) return false;",
        programs=LL_NETWORKS,
    ),
    Mutant("dispatch: rows are not waited for", LL_RECEIVE, LL_TAGS, "(void)slots, (void)tags, (void)from;", LL),
    Mutant(
        "dispatch: words are not waited for",
        LL_WORDS,
        "if (i >= count || words[i] >> 32 == static_cast<uint32_t>(call.number)) continue;",
        "continue;",
        LL,
    ),
    changed("flat rows: a token counts itself", LL_LINES, LL_PLACE, "{1}", "{2}", LL),
    Mutant("flat rows: unused ones are not marked", LL_LINES, LL_MARK, programs=LL),
    Mutant("dispatch: a host that waits gets no report", LL_RECEIVE, LL_REPORT, programs=LL),
    Mutant("lines: not waited for", WARP, "if (seen < all.observed) all.observed = seen;", "(void)seen;", LL),
    changed(
        "transpose: one's own bits twice",
        WARP,
        """bits.value = lane_id() & size ? (bits.value & ~low) | (other & ~low) >> size
                                          : (bits.value & low) | (other & low) << size;""",
        "(other & low) << size",
        "(bits.value & low) << size",
        LL,
    ),
    changed(
        "sums of lines: weights of other rows",
        LINES,
        "sums.add(rows[row], weight_of(own_weight, lane));",
        "own_weight, lane",
        "own_weight, 0",
        ROWS,
    ),
    changed(
        "sums to lines: from the row's first byte",
        BULK,
        "for_each_piece<kStep, CacheHint::EvictFirst>(own_part, own_weight, mask, here, add);",
        "own_part",
        "own_src",
        ROWS,
    ),
    Mutant("lines: the tag is stored apart", LINES, LL_STORE, LL_STORE_APART, LL),
    Mutant("combine: sends into a bank that is not released", LL_COMBINE, LL_BANK, "", LL),
    Mutant("combine: rows are not waited for", LL_COMBINE, LL_PARTS, "(void)sent, (void)from;", LL),
]
