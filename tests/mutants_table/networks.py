"""What goes between nodes."""

from mutants_table.mutant import COORDINATORS, NCCL, P2P, QUEUES, RANK, RING, SYSTEM, Mutant, changed

QUEUE, QUEUE_FABRIC = "fabric/queue/send_queue.h", "fabric/queue/queue_fabric.h"
ENTRY = "fabric/queue/entry.h"
DIRECT_PAIR, CARD_LINK = "fabric/verbs/direct_pair.cpp", "fabric/queue/card_link.cpp"
SOFTWARE_NIC, NIC_PORTS = "fabric/queue/software_nic.cpp", "fabric/queue/software_nic_ports.cpp"
DEVICE_RANK = "exec/device/device_rank.h"
NVSHMEM, RESET = "fabric/nvshmem/nvshmem_fabric.h", "launch/nccl/reset_signals.h"
NCCL_COUNT = "params.sent[signal + params.writer_of(rank) - params.writer_of(params.comm.rank)] += increment;"
NCCL_ARRIVED = "return total > 0 && gin.readSignal(static_cast<uint32_t>(number)) == total - 1;"
NVSHMEM_ADD = "nvshmemx_signal_op(flag, increment, NVSHMEM_SIGNAL_ADD, rank);"
NVSHMEM_ACQUIRE = "return W::template acquire<Scope::System>(own<uint64_t>(flag));"
DIRECT = ("direct",)
NIC = ("send_queue",)
DOORBELL = "warp.template publish<Scope::System>(doorbell_word(), rung_for(end));"
BELL = "warp.template publish<Scope::System>(card->bell, bell_of(end, ends_in_addition));"
CARD_ADDITION = """return SendEntry::add_of(index, card->number, {card->flags, flag}, increment,
                                     card->scratch);"""
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
            store(queue.card->bell, queue.bell_of(own[lane] + entries, entries != 0));
            queue.fence_bell();
        });"""
HALF = "if (card->template is_over<W>(middle)) return middle + 1;"
FIRST = "return first + card->template is_over<W>(first);"
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
ROWS_THEN_SIGNAL = """if constexpr (!F::kMapsAll) put_rows(warp, rings, node, from, to);
        fabric.signal_to(warp, channel, args.on_rail(node),
                         args.heap.rdma_tail(channel, args.node()), from, to);"""
HAS_ENDED = "return ptx::load_acquire_sys(&rank.control->abort) || (rank.polls_report && host_aborted(rank));"
SIGNAL_TO = "warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);"
CREDIT_TO = "warp.template credit<Scope::System>(at<uint64_t>(rank, flag), to);"
ACQUIRE_SIGNAL = "return W::template acquire<Scope::System>(own<uint64_t>(flag));"
LL_QUEUE = ("low_latency_queue",)

MUTANTS = [
    # ---- between nodes
    changed("p2p signal_to: the rank's scope", P2P, SIGNAL_TO, SYSTEM, RANK),
    changed("p2p signal_to: a credit", P2P, SIGNAL_TO, "publish<", "credit<"),
    changed("p2p credit_to: the rank's scope", P2P, CREDIT_TO, SYSTEM, RANK),
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
        f"if (card) {BELL} {DOORBELL}",
        QUEUES,
    ),
    Mutant("send queue: no lane's bell rings", QUEUE, LANES_BELL, "", LL_QUEUE),
    changed("send queue: a lane's bell in the rank's scope", QUEUE, LANES_BELL, SYSTEM, RANK, LL_QUEUE),
    changed("send queue: a lane's bell relaxed", QUEUE, LANES_BELL, "publish_", "credit_", LL_QUEUE),
    changed("send queue: half of a card's ring passes for all of it", QUEUE, HALF, "middle + 1", "posted", NIC),
    changed(
        "send queue: half of a card's ring is one less", QUEUE, HALF, "return middle + 1", "return middle + 2", NIC
    ),
    changed(
        "send queue: a card is always done with its first entry",
        QUEUE,
        FIRST,
        "card->template is_over<W>(first)",
        "1",
        NIC,
    ),
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
    changed("send queue: a flag by the key of data", QUEUE, CARD_ADDITION, "card->flags", "card->data", QUEUES),
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
    Mutant("host_aborted: tells nobody", DEVICE_RANK, "if (word) abort_all(rank, word);", "", QUEUES),
    changed("open_rdma_rings: not run empty", RING, RDMA_DRAIN, "F::kOrdersWarps && ", "", ("nvshmem",)),
    Mutant(
        "sender_coordinator: the signal before the rows",
        COORDINATORS,
        ROWS_THEN_SIGNAL,
        "fabric.signal_to(warp, channel, args.on_rail(node), "
        "args.heap.rdma_tail(channel, args.node()), from, to); "
        "if constexpr (!F::kMapsAll) put_rows(warp, rings, node, from, to);",
        ("nccl", "nvshmem"),
    ),
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
    Mutant(
        "direct: queue pairs go on after the end",
        "fabric/queue/card_link.h",
        "~CardLink() override { «CardLink::stop();» }",
        "",
        DIRECT,
    ),
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
            """link->add({Frame::kWrite, region, static_cast<uint32_t>(piece), address + taken.offset},
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
        "add(port->second->heaps_[rank_] + frame.address, frame.increment);",
        "add(port->second->heaps_[rank_] + frame.address, 2 * frame.increment);",
        NIC,
    ),
]
