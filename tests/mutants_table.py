"""The mutants that mutants.py makes: each takes a fence, a wait or an order from the kernels."""

from dataclasses import dataclass

QUANTIZE = "exec/device/quantize.h"
BULK, WARP, KERNELS = "exec/device/bulk.h", "exec/device/device_warp.h", "launch/cuda/kernels.h"
FUSED = "launch/cuda/fused_dispatch.h"
ARGS = "core/args.h"
RING, DISPATCH, COMBINE = "protocol/ring.h", "protocol/dispatch.h", "protocol/combine.h"
COMBINE_RECEIVER, INTRA_RANK = "protocol/combine_receiver.h", "protocol/intra_rank.h"
COORDINATORS, NOTIFY = "protocol/coordinators.h", "protocol/notify.h"
P2P, NCCL = "fabric/cuda/p2p_fabric.h", "fabric/nccl/nccl_fabric.h"
LOW_LATENCY = "protocol/low_latency.h"
LL_HALVES = "protocol/low_latency_halves.h"
LL_COMBINE, LL_MASK = "protocol/low_latency_combine.h", "protocol/low_latency_mask.h"
LL_DISPATCH, LL_RECEIVE = "protocol/low_latency_dispatch.h", "protocol/low_latency_dispatch_receive.h"
LL_HEAP = "core/low_latency_heap.h"
LL_WORDS, LINES = "protocol/low_latency_words.h", "exec/device/lines.h"
QUEUE, QUEUE_FABRIC = "fabric/queue/send_queue.h", "fabric/queue/queue_fabric.h"
ENTRY = "fabric/queue/entry.h"
DIRECT_PAIR, CARD_LINK = "fabric/verbs/direct_pair.cpp", "fabric/queue/card_link.cpp"
SOFTWARE_NIC, NIC_PORTS = "fabric/queue/software_nic.cpp", "fabric/queue/software_nic_ports.cpp"
HELD = "fabric/queue/held_additions.h"
DEVICE_RANK = "exec/device/device_rank.h"
NVSHMEM, RESET = "fabric/nvshmem/nvshmem_fabric.h", "launch/nccl/reset_signals.h"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below csrc
    text: str  # occurs exactly once; the statement in « », or all of it
    replacement: str = ""
    programs: tuple[str, ...] = ("p2p",)

    def parts(self) -> tuple[str, str, str]:
        """What stands before the statement, the statement, what stands behind it."""
        before, mark, rest = self.text.partition("«")
        if not mark:
            return "", self.text, ""
        statement, _, after = rest.partition("»")
        return before, statement, after


def changed(name: str, file: str, statement: str, old: str, new: str, programs: tuple[str, ...] = ("p2p",)) -> Mutant:
    """A statement in which one text is replaced by another."""
    assert old in statement, name
    mark = Mutant(name, file, statement).parts()[1]
    return Mutant(name, file, statement, mark.replace(old, new), programs)


ROWS = ("rows",)
SYSTEM, RANK = "<Scope::System>", "<Scope::Rank>"

NCCL_COUNT = "params.sent[signal + params.writer_of(rank) - params.writer_of(params.comm.rank)] += increment;"
NCCL_ARRIVED = "return total > 0 && gin.readSignal(static_cast<uint32_t>(number)) == total - 1;"
NVSHMEM_ADD = "nvshmemx_signal_op(flag, increment, NVSHMEM_SIGNAL_ADD, rank);"
NVSHMEM_ACQUIRE = "return W::template acquire<Scope::System>(own<uint64_t>(flag));"
QUEUES = ("queue",)
DIRECT = ("direct",)
NIC = ("send_queue",)
DOORBELL = "warp.template publish<Scope::System>(doorbell_word(), rung_for(end));"
BELL = "warp.template publish<Scope::System>(card()->bell, bell_of(end, ends_in_addition));"
CARD_ADDITION = """return SendEntry::add_of(index, card()->number, {card()->flags, flag}, increment,
                                     card()->scratch);"""
RUNG = "if (rings) ring(warp, own + 1, true);"
POSTED = "warp.template publish<Scope::Rank>(&producer->posted, own + 1);"
LANES_RING = """warp.template publish_lanes<Scope::System>(32, [&](int lane, auto&& store) {
            if (!is_in(mask, lane)) return;
            const auto queue = queue_of(lane);
            store(queue.doorbell_word(), queue.rung_for(own[lane] + entries));
            queue.wake_sleeper();
        });"""
LANES_BELL = """warp.template publish_lanes<Scope::System>(32, [&](int lane, auto&& store) {
            if (!has_bell(lane)) return;
            const auto queue = queue_of(lane);
            queue.fence_bell();
            store(queue.card()->bell, queue.bell_of(own[lane] + entries, entries != 0));
            queue.fence_bell();
        });"""
OVER = """return Completion::is_there(W::template acquire<Scope::System>(word),
                                    entry >> completion_bits);"""
LANES_POSTED = """warp.template publish_lanes<Scope::Rank>(32, [&](int lane, auto&& store) {
            if (is_in(ready, lane)) store(&queue_of(lane).producer->posted, own[lane] + 1);
        });"""
LANES_TURN = """return WaitCondition{W::template acquire<Scope::Rank>(posted), own[lane],
                                 peer_of(lane)};"""
TURN_OF_QUEUE = "return WaitCondition{W::template acquire<Scope::Rank>(&producer->posted), own, peer};"
COMPLETED = "return completed_by(W::template acquire<Scope::System>(completion->last_word()), posted);"
LAST_COMPLETED = """return posted - static_cast<uint16_t>(static_cast<uint16_t>(posted) - 1 -
                                              Completion::entry_of(word));"""
QUEUE_ACQUIRE = "return W::template acquire<Scope::System>(network<uint64_t>(flag));"
RDMA_DRAIN = "if (F::kOrdersWarps && out.slot_bytes == slot_bytes) return nothing_to_wait_for();"
ROWS_THEN_SIGNAL = """if constexpr (!F::kMapsRail) put_rows(warp, rings, node, from, to);
        fabric.put_signal(warp, channel, node, args.heap.rdma_tail(channel, args.node()), from, to);"""

FORWARDER_WAITS = """while (!warp.met(format.topk, has_arrived)) {
            const uint32_t absent =
                warp.ballot(format.topk, [&](int lane) { return !is_met(arrived(lane)); });
            if (absent) return warp.broadcast(peer, lowest_lane(absent));
        }"""
REACHED = """return WaitCondition{W::template acquire<Scope::Rank>(&tokens), before + (token - first),
                             args.rank};"""
LETS_COME = """if (lane_id() == 0 && ptx::fetch_add_shared(&done_of_block(), 1) + 1 == blockDim.x / 32)
                ptx::let_next_launch_come();"""
BEGINS = "if (does_nothing(args) || !begins(joint, position, args, number)) return;"
ENDS = "if (!joint.ends_call || does_nothing(joint.args[position.index])) return;"
PASSES = """if (!has_intra_rank_pass(args) || !args.layout.totals().epoch || does_nothing(args) ||
        is_aborted(rank))
        return;"""
GUESSED = """return rows >= min_rows && rows <= max_rows && totals.received_rows <= max_received &&
               totals.rail_rows <= max_rail;"""
HAS_ENDED = "return ptx::load_acquire_sys(&rank.control->abort) || (rank.hears_report && has_heard(rank));"
FREED = "warp.template publish<Scope::Rank>(&order.freed, before + freed);"
FREE_SLOTS = """«if (!here || (kAlone && ++batch == args.nvl_batch)) {
            publish_heads(warp, rings, own_node);
            batch = 0;
        }»"""
TAKEN_UP = "warp.template publish<Scope::Rank>(&order.taken_up, before + (token - first) + 1);"
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
SUMS = "warp.template publish<Scope::Rank>(summed, sums_of_call(args, ++done));"
NVL_SENDER = "warp.template publish<Scope::System>(rings.nvl_out_tail(batch.node, batch.peer), next);"
COMBINE_FORWARDER = "warp.template publish<Scope::Rank>(&rings.rdma_out(node).next, ++next);"
FOLLOW = "moved[lane] = W::template acquire<Scope::Rank>(cursor(lane));"
RAIL_COUNTS = """return WaitCondition{
                fabric.template acquire_signal<W>(heap.channels, heap.notify_rail_flag(node)),
                args.epoch, topology.rank(node, own_local)};"""
RDMA_CREDIT = """return {rings.template acquire_rdma_head<W>(node) + rings.rdma_slots, next + 1,
            rings.rank_at(node, rings.args.local())};"""
MET = "return nothing_to_wait_for();"
RELAY = """warp.template publish<Scope::System>(
        fabric.template peer<uint64_t>(local, heap.notify_node_flag(own_local, group)), args.epoch);"""
COUNTS = """return WaitCondition{
                        W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag)),
                        args.epoch, topology.rank(topology.node_of(args.rank), first + lane)};"""
POINTS = (
    "if (lane_id() == 0)\n            of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys)(flag, value);"
)
LANES = "f(lane_id(), of_scope<scope>(ptx::store_release_gpu, ptx::store_release_sys));"
PUT_SIGNAL = "warp.template publish<Scope::System>(rail<uint64_t>(node, flag), to);"
PUT_CREDIT = "warp.template credit<Scope::System>(rail<uint64_t>(node, flag), to);"
ACQUIRE_SIGNAL = "return W::template acquire<Scope::System>(own<uint64_t>(flag));"

LL = ("low_latency",)
LL_NETWORKS = ("low_latency_nvshmem", "low_latency_nccl")
LL_QUEUE = ("low_latency_queue",)
LL_ARRIVE = "if (lane_id() == 0) before = ptx::fetch_add_acq_rel_gpu(counter, n);"
LL_ACQUIRE = "return W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag));"
LL_CREDIT = """«warp.template credit_lanes<Scope::System>(lanes, [&](int lane, auto&& store) {
        if (call.fabric.maps(first + lane) && names(first + lane))
            store(call.fabric.template at<uint64_t>(first + lane, flag), to);
    });»"""
LL_RELEASES = "return last && *call.fabric.template own<uint64_t>(released) == last;"
LL_TO_ALL = "to_all = *call.fabric.template own<uint64_t>(heap.sent(Args::kKind)) > call.number;"
LL_TAG = "tag[lane] = W::template acquire<Scope::System>(flag);"
LL_SIGNAL = "warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);"
LL_BANK = "if (!may_send(warp, call, team)) return Ended::Badly;"
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
LL_PARTS = "if (!wait_tags(warp, call, format.topk, sent, slot, i, from)) return false;"

MUTANTS = [
    # ---- the copy engine
    Mutant("init: no fence after the barriers", BULK, "ptx::fence_barrier_init();", programs=ROWS),
    Mutant("stage: no proxy fence", BULK, "«ptx::fence_proxy_async_global();»\n        in_ ="),
    Mutant(
        "for_each_chunk: the buffer is not waited for", BULK, "«wait_filled();»\n            f(buffer", programs=ROWS
    ),
    Mutant(
        "for_each_chunk: writes are not committed",
        BULK,
        "«ptx::bulk_commit();»\n            ++emptied_;\n            //",
        programs=ROWS,
    ),
    Mutant(
        "drop: the buffer is not waited for", BULK, "«wait_filled();»\n            ptx::bulk_commit();", programs=ROWS
    ),
    Mutant("sum: no proxy fence", BULK, "«ptx::fence_proxy_async_global();»\n        ptx::bulk_wait_read<0>();"),
    Mutant(
        "sum: older writes are not waited for",
        BULK,
        "fence_proxy_async_global();\n        «ptx::bulk_wait_read<0>();»",
        programs=ROWS,
    ),
    Mutant(
        "sum: lanes do not meet before the first piece",
        BULK,
        "«__syncwarp();»  // now no lane's writes read the buffers",
        programs=ROWS,
    ),
    Mutant("sum: lanes do not meet between pieces", BULK, "«__syncwarp();»  // the pieces before these", programs=ROWS),
    Mutant(
        "sum: pieces are not waited for",
        BULK,
        "while (!ptx::barrier_try_wait(&buffers_.pieces_filled, sums_ & 1)) {\n            }",
        programs=ROWS,
    ),
    Mutant(
        "copy_each: older writes are not waited for",
        BULK,
        "«ptx::bulk_wait_read<0>();»\n                uint64_t* barrier",
        programs=ROWS,
    ),
    Mutant("copy_each: lanes do not meet", BULK, "«__syncwarp();»  // now no lane's writes read that", programs=ROWS),
    Mutant(
        "copy_each: rows are not waited for", BULK, "«wait_filled();»\n                if (is_in(first))", programs=ROWS
    ),
    Mutant(
        "copy_each: writes are not committed",
        BULK,
        "«ptx::bulk_commit();»\n                ++emptied_;",
        programs=ROWS,
    ),
    Mutant("wait_written: nothing is waited for", BULK, "ptx::bulk_wait_written();", programs=ROWS),
    Mutant("share: no proxy fence", BULK, "«ptx::fence_proxy_async_shared();»\n        return {first};", programs=ROWS),
    Mutant(
        "quantize: no proxy fence", BULK, "«ptx::fence_proxy_async_shared();»\n            __syncwarp();", programs=ROWS
    ),
    Mutant(
        "quantize: lanes do not meet",
        BULK,
        "ptx::fence_proxy_async_shared();\n            «__syncwarp();»",
        programs=ROWS,
    ),
    Mutant("quantize_shared: lanes do not meet", QUANTIZE, "«__syncwarp();»  // all have read", programs=ROWS),
    Mutant("fill: older writes are not waited for", BULK, "ptx::bulk_wait_read<kPending>();", programs=ROWS),
    Mutant("fill: lanes do not meet", BULK, "ptx::bulk_wait_read<kPending>();\n        «__syncwarp();»"),
    # ---- the warp
    Mutant("end of a warp: staged rows are left", WARP, "«bulk_.drop();»\n        finish_writes();", programs=ROWS),
    Mutant("end of a warp: writes are left", WARP, "bulk_.drop();\n        «finish_writes();»"),
    Mutant("lanes: they do not meet", WARP, "if (lane_id() < count) f(lane_id());\n        «__syncwarp();»"),
    Mutant("met: lanes do not meet", WARP, "«__syncwarp();»  // what a lane has acquired is there for all: a vote"),
    Mutant("wait: lanes do not meet", WARP, "if (began) note_wait(peer, began);\n                «__syncwarp();»"),
    Mutant("finish_writes: the engine is not waited for", WARP, "bulk_.wait_written();"),
    Mutant("finish_writes: lanes do not meet", WARP, "bulk_.wait_written();\n        «__syncwarp();»"),
    Mutant(
        "publish: writes are not finished",
        WARP,
        " void publish(uint64_t* flag, uint64_t value) {\n        «finish_writes();»",
    ),
    Mutant("publish: relaxed", WARP, POINTS, POINTS.replace("release", "relaxed")),
    Mutant(
        "publish_lanes: writes are not finished",
        WARP,
        " void publish_lanes(int count, F&& f) {\n        «finish_writes();»",
    ),
    Mutant("publish_lanes: relaxed", WARP, LANES, LANES.replace("release", "relaxed")),
    Mutant(
        "acquire: a plain load",
        WARP,
        "return of_scope<scope>(ptx::load_acquire_gpu, ptx::load_acquire_sys)(flag);",
        "return *flag;",
    ),
    Mutant("scopes: all are the GPU's", WARP, "return scope == Scope::Rank ? gpu : sys;", "return gpu;"),
    changed("let_next_launch_come: the first warp does", WARP, LETS_COME, "blockDim.x / 32", "1", LL),
    # ---- a dispatch that is launched ahead
    changed("a wrong guess: dispatched", KERNELS, BEGINS, "does_nothing(args) || ", ""),
    changed("a wrong guess: ended", KERNELS, ENDS, " || does_nothing(joint.args[position.index])", ""),
    changed("a wrong guess: own rows copied", KERNELS, PASSES, "does_nothing(args)", "false"),
    changed("a guess: too much room", ARGS, GUESSED, "rows >= min_rows", "true"),
    changed("a guess: too little room", ARGS, GUESSED, "rows <= max_rows", "true"),
    changed("a guess: small tables", ARGS, GUESSED, "totals.received_rows <= max_received", "true"),
    changed("a guess: small tables of the rail", ARGS, GUESSED, "totals.rail_rows <= max_rail", "true"),
    # ---- warps that meet
    Mutant(
        "meet: lanes do not meet behind",
        KERNELS,
        "«__syncwarp();»  // what lane 0 has acquired is there for all: a shuffle orders nothing",
    ),
    changed(
        "meet: relaxed",
        KERNELS,
        "if (first) all = (quotient(ptx::fetch_add_acq_rel_gpu(arrivals, 1), warps) + 1) * warps;",
        "fetch_add_acq_rel_gpu",
        "fetch_add_sys",
    ),
    Mutant("end_call: lanes do not meet before", KERNELS, "«__syncwarp();»\n    uint64_t before = 0;"),
    Mutant("end_call: lanes do not meet behind", KERNELS, "«__syncwarp();»  // what lane 0 has acquired there"),
    changed(
        "end_call: relaxed",
        KERNELS,
        "if (first) before = ptx::fetch_add_acq_rel_gpu(arrivals, 1);",
        "fetch_add_acq_rel_gpu",
        "fetch_add_sys",
    ),
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
    Mutant("PendingCounts: lanes do not meet behind", FUSED, "«__syncwarp();»  // what lane 0 has acquired"),
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
        """return args.topology().node_of(rank) == node &&
               !(rank == args.rank && args.has_intra_rank_pass);""",
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
        "if (!here && !warp.wait_all(Wait::PartialRow, format.topk, arrived)) return;",
        "(void)here;",
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
        "if (!warp.wait_all(Wait::ReceiverOrder, 1, may_take_up)) return;",
    ),
    Mutant(
        "combine_receiver: slots are freed out of order",
        COMBINE_RECEIVER,
        "if (!kAlone && !warp.wait_all(Wait::ReceiverOrder, 1, may_free)) return;",
    ),
    changed(
        "combine_receiver: who waits for a row does not tell of free slots",
        COMBINE_RECEIVER,
        FREE_SLOTS,
        "!here || (kAlone",
        "(kAlone",
    ),
    changed("combine_receiver: a credit for taking up", COMBINE_RECEIVER, TAKEN_UP, "publish<", "credit<"),
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
    # ---- between nodes
    changed("p2p put_signal: the rank's scope", P2P, PUT_SIGNAL, SYSTEM, RANK),
    changed("p2p put_signal: a credit", P2P, PUT_SIGNAL, "publish<", "credit<"),
    changed("p2p put_credit: the rank's scope", P2P, PUT_CREDIT, SYSTEM, RANK),
    changed("p2p acquire_signal: the rank's scope", P2P, ACQUIRE_SIGNAL, SYSTEM, RANK),
    changed("p2p acquire_signal: a plain load", P2P, ACQUIRE_SIGNAL, "W::template acquire<Scope::System>", "*"),
    Mutant("nccl put: no fence", NCCL, "«__threadfence_system();»\n    gin_of(params", programs=("nccl",)),
    Mutant(
        "nccl put: writes are not finished",
        NCCL,
        "«warp.finish_writes();»  // by the copy engine",
        programs=("nccl",),
    ),
    changed("nccl signal: not counted", NCCL, NCCL_COUNT, "+= increment", "+= 0", ("nccl",)),
    changed("nccl reset: totals say nothing", RESET, NCCL_ARRIVED, "total > 0 &&", "total > 0 ||", ("nccl",)),
    Mutant("nccl reset: counts stay", RESET, "params.sent[number] = 0;", programs=("nccl",)),
    Mutant(
        "nvshmem put: writes are not finished",
        NVSHMEM,
        "«warp.finish_writes();»  // by the copy engine",
        programs=("nvshmem",),
    ),
    Mutant("nvshmem signal: no fence", NVSHMEM, "if (fence) nvshmem_fence();", programs=("nvshmem",)),
    Mutant(
        "nvshmem signals of lanes: no fence",
        NVSHMEM,
        "if (lane == 0) nvshmem_fence();",
        programs=("low_latency_nvshmem",),
    ),
    Mutant(
        "nccl puts of lanes: they do not meet",
        NCCL,
        "«__syncwarp();»  // a lane puts what others have written",
        programs=("low_latency_nccl",),
    ),
    changed(
        "nvshmem signal: a fence that nothing needs",
        NVSHMEM,
        "«if (fence) nvshmem_fence();»",
        "(fence)",
        "(true)",
        ("nvshmem",),
    ),
    Mutant("nvshmem signal: none", NVSHMEM, NVSHMEM_ADD, programs=("nvshmem",)),
    Mutant(
        "nvshmem signal: sets",
        NVSHMEM,
        NVSHMEM_ADD,
        "nvshmemx_signal_op(flag, increment, NVSHMEM_SIGNAL_ADD - 1, rank);",
        ("nvshmem",),
    ),
    changed("nvshmem acquire_signal: the rank's scope", NVSHMEM, NVSHMEM_ACQUIRE, SYSTEM, RANK, ("nvshmem",)),
    changed(
        "nvshmem acquire_signal: a plain load",
        NVSHMEM,
        NVSHMEM_ACQUIRE,
        "W::template acquire<Scope::System>",
        "*",
        ("nvshmem",),
    ),
    changed(
        "send queue: not in turn",
        QUEUE,
        TURN_OF_QUEUE,
        "W::template acquire<Scope::Rank>(&producer->posted)",
        "own",
        QUEUES,
    ),
    Mutant(
        "send queue: a turn that never came",
        QUEUE,
        "if (!is_next || !make_room(warp, own, peer)) return false;",
        "if (!make_room(warp, own, peer)) return false;",
        QUEUES,
    ),
    Mutant(
        "send queue: no room is made",
        QUEUE,
        "if (!is_next || !make_room(warp, own, peer)) return false;",
        "if (!is_next) return false;",
        ("queue",),
    ),
    changed(
        "send queue: an addition that does not ring",
        QUEUE,
        RUNG,
        "(rings)",
        "(false)",
        QUEUES,
    ),
    changed("send queue: rung for less", QUEUE, RUNG, "own + 1", "own", QUEUES),
    changed(
        "send queue: a full one is not rung",
        QUEUE,
        "«ring(warp, own, false);»  // what waits",
        "ring(warp, own, false)",
        "",
        QUEUES,
    ),
    changed("send queue: the doorbell in the rank's scope", QUEUE, DOORBELL, SYSTEM, RANK, QUEUES),
    changed("send queue: the doorbell relaxed", QUEUE, DOORBELL, "publish", "credit", QUEUES),
    changed("send queue: a lane's doorbell in the rank's scope", QUEUE, LANES_RING, SYSTEM, RANK, LL_QUEUE),
    changed("send queue: no bell rings", QUEUE, BELL, BELL, "", QUEUES),
    changed("send queue: the bell in the rank's scope", QUEUE, BELL, SYSTEM, RANK, QUEUES),
    changed("send queue: the bell relaxed", QUEUE, BELL, "publish", "credit", QUEUES),
    Mutant(
        "send queue: the bell rings before its record",
        QUEUE,
        DOORBELL,
        f"if (card()) {BELL} {DOORBELL}",
        QUEUES,
    ),
    Mutant("send queue: no lane's bell rings", QUEUE, LANES_BELL, "", LL_QUEUE),
    changed("send queue: a lane's bell in the rank's scope", QUEUE, LANES_BELL, SYSTEM, RANK, LL_QUEUE),
    changed("send queue: a lane's bell relaxed", QUEUE, LANES_BELL, "publish_", "credit_", LL_QUEUE),
    changed("send queue: a card's completions of any round", QUEUE, OVER, "entry >> completion_bits", "0", QUEUES),
    changed("send queue: a card's completions in the rank's scope", QUEUE, OVER, SYSTEM, RANK, QUEUES),
    changed(
        "send queue: a card's completions are read relaxed",
        QUEUE,
        OVER,
        "W::template acquire<Scope::System>(",
        "*(",
        QUEUES,
    ),
    changed("send queue: a flag by the key of data", QUEUE, CARD_ADDITION, "()->flags", "()->data", QUEUES),
    changed("send queue: a lane's turn is passed on relaxed", QUEUE, LANES_POSTED, "publish_", "credit_", LL_QUEUE),
    changed(
        "send queue: a lane's turn is read relaxed",
        QUEUE,
        LANES_TURN,
        "W::template acquire<Scope::Rank>",
        "*",
        LL_QUEUE,
    ),
    changed("send queue: a lane not in turn", QUEUE, LANES_TURN, "own[lane],", "0,", LL_QUEUE),
    changed("send queue: the turn is passed on relaxed", QUEUE, POSTED, "publish", "credit", ("low_latency_queue",)),
    changed(
        "send queue: the turn is read relaxed",
        QUEUE,
        TURN_OF_QUEUE,
        "W::template acquire<Scope::Rank>(&",
        "(",
        ("low_latency_queue",),
    ),
    changed(
        "send queue: completions are read relaxed",
        QUEUE,
        COMPLETED,
        "W::template acquire<Scope::System>(",
        "*(",
        QUEUES,
    ),
    changed("send queue: completions in the rank's scope", QUEUE, COMPLETED, SYSTEM, RANK, QUEUES),
    changed("send queue: one completion too many", QUEUE, LAST_COMPLETED, "return posted", "return 1 + posted", QUEUES),
    changed("send queue: one completion too few", QUEUE, LAST_COMPLETED, "(posted) - 1 -", "(posted) -", QUEUES),
    Mutant(
        "entry: bytes are not swapped",
        ENTRY,
        "result = static_cast<T>(result << 8 | (value >> 8 * i & 0xff));",
        "result = value;",
        QUEUES,
    ),
    changed("queue acquire_signal: the rank's scope", QUEUE_FABRIC, QUEUE_ACQUIRE, SYSTEM, RANK, QUEUES),
    changed(
        "queue acquire_signal: a plain load",
        QUEUE_FABRIC,
        QUEUE_ACQUIRE,
        "W::template acquire<Scope::System>",
        "*",
        QUEUES,
    ),
    Mutant("has_ended: hears no host", DEVICE_RANK, HAS_ENDED, HAS_ENDED.split(" || ")[0] + ";", QUEUES),
    Mutant("has_heard: tells nobody", DEVICE_RANK, "if (word) abort_all(rank, word);", "", QUEUES),
    changed("open_rdma_rings: not run empty", RING, RDMA_DRAIN, "F::kOrdersWarps && ", "", ("nvshmem",)),
    Mutant(
        "sender_coordinator: the signal before the rows",
        COORDINATORS,
        ROWS_THEN_SIGNAL,
        "fabric.put_signal(warp, channel, node, args.heap.rdma_tail(channel, args.node()), from, to); "
        "if constexpr (!F::kMapsRail) put_rows(warp, rings, node, from, to);",
        ("nccl", "nvshmem"),
    ),
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
        "*call.fabric.template own<uint64_t>(signalled) = call.number;",
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
        "return call.previous() && *call.fabric.template own<uint64_t>(credited) != call.previous();",
        "(void)credited; return false;",
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
        "from = *call.fabric.template own<uint64_t>(heap.credited(call.bank));",
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
        "if (told) return end_by(first + lowest_lane(told));",
        "",
        LL,
    ),
    Mutant(
        "mask_ranks: nobody is told why",
        LL_MASK,
        "tell(silent, MaskReason::Silent);",
        "tell(silent, MaskReason::Asked);",
        LL,
    ),
    Mutant("decide_membership: lanes do not meet", LL_MASK, "warp.lanes(lanes, [](int) {});", programs=LL),
    changed("wait_tags: the rank's scope", LOW_LATENCY, LL_TAG, SYSTEM, RANK, LL),
    changed("wait_tags: a plain load", LOW_LATENCY, LL_TAG, "W::template acquire<Scope::System>", "*", LL),
    changed("p2p signal_to: the rank's scope", P2P, LL_SIGNAL, SYSTEM, RANK, LL),
    changed("p2p signal_to: a credit", P2P, LL_SIGNAL, "publish<", "credit<", LL),
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
    # ---- queues of a card in which ranks post by themselves
    Mutant(
        "direct: completions may not be overrun", DIRECT_PAIR, "wanted.flags = CqInitAttr::kIgnoreOverrun;", "", DIRECT
    ),
    Mutant("direct: completions of any size", DIRECT_PAIR, "own.entry_bytes = sizeof(Completion);", "", DIRECT),
    changed(
        "direct: any completion in its place is the last",
        DIRECT_PAIR,
        "return Completion::entry_of(word) == last ? &there : nullptr;",
        "Completion::entry_of(word) == last ? &there : nullptr",
        "&there",
        DIRECT,
    ),
    Mutant("direct: nothing was posted is not idle", DIRECT_PAIR, "if (last_completion()) return true;", "", DIRECT),
    Mutant(
        "direct: the last error is the cause",
        DIRECT_PAIR,
        """if (Completion::is_error(last_word(other)) && other.syndrome != kMlx5Flushed)
            found = &other;""",
        "",
        DIRECT,
    ),
    Mutant(
        "direct: no error is told",
        DIRECT_PAIR,
        'if (!found || !Completion::is_error(last_word(*found))) return "";',
        'return "";',
        DIRECT,
    ),
    Mutant("direct: errors after the end of a region count", CARD_LINK, "if (region.was_closed) continue;", "", DIRECT),
    Mutant(
        "direct: what is posted after the end of a region is not given up",
        CARD_LINK,
        "«stop(region);»  // what is posted later fails at once",
        ";",
        DIRECT,
    ),
    Mutant(
        "direct: a region ends before what was posted there",
        CARD_LINK,
        "if (!region.asked && !is_idle(region)) return false;",
        "",
        DIRECT,
    ),
    Mutant(
        "direct: a region ends before the other side knows",
        CARD_LINK,
        "if (!region.was_confirmed) return false;",
        "",
        DIRECT,
    ),
    Mutant("direct: queue pairs go on after the end", CARD_LINK, "CardLink::~CardLink() { «stop();» }", "", DIRECT),
    Mutant(
        "direct: a network that starts again keeps its queue pairs",
        SOFTWARE_NIC,
        "for (Port::Side& side : port->sides_) side.is_connected = false;",
        "",
        DIRECT,
    ),
    Mutant("direct: nobody watches", NIC_PORTS, "static_cast<CardLink&>(link).open(number, side.pairs);", ";", DIRECT),
    *(
        changed(
            name,
            SOFTWARE_NIC,
            """link->add({Frame::kWrite, region, same, static_cast<uint32_t>(piece),
                   address + taken.offset, 0, taken.batch},
                  source + taken.offset, is_last ? complete : std::function<void()>());""",
            before,
            after,
            NIC,
        )
        for name, before, after in (
            ("nic: all pieces of a write go to its beginning", "address + taken.offset", "address"),
            ("nic: all pieces of a write are its first", "source + taken.offset", "source"),
            (
                "nic: the rest of a long write is lost",
                "link->add(",
                "if (taken.offset) { if (is_last) complete(); } else link->add(",
            ),
        )
    ),
    Mutant(
        "nic: a signal passes the rest of its write",
        SOFTWARE_NIC,
        "taken.begun += is_last;",
        "++taken.begun; taken.offset = 0;",
        NIC,
    ),
    Mutant(
        "nic: signals and credits count twice",
        SOFTWARE_NIC,
        """} else if (frame.kind == Frame::kAdd) {
            «carry_out(frame);»""",
        "carry_out(frame); carry_out(frame);",
        NIC,
    ),
    changed(
        "nic: a signal waits for no writes where nothing keeps order",
        SOFTWARE_NIC,
        """link->add({Frame::kAdd, region, same, 0, address, increment, taken.batch++,
                           std::exchange(taken.writes, 0)},
                          nullptr, complete);""",
        "std::exchange(taken.writes, 0)",
        "0",
        NIC,
    ),
    Mutant(
        "nic: a signal that comes before its writes is not held",
        HELD,
        "if (!addition || arrived < addition->writes) break;",
        "if (!addition) break;",
        NIC,
    ),
]
