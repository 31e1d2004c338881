"""What goes between nodes."""

from mutants_table.mutant import RANK, SYSTEM, Table

NVSHMEM_ADD = "nvshmemx_signal_op(flag, increment, NVSHMEM_SIGNAL_ADD, rank);"
NVSHMEM_ACQUIRE = "return W::template acquire<Scope::System>(own<uint64_t>(flag));"
DOORBELL = "warp.template publish<Scope::System>(doorbell_word(), rung_for(end));"
BELL = "warp.template publish<Scope::System>(card->bell, bell_of(end, ends_in_addition));"
RUNG = "if (rings) ring(warp, own + 1, true);"
LANES_BELL = "warp.template publish_lanes<Scope::System>(32, [&](int lane, auto&& store) { if (!has_bell…});"
HALF = "if (card->template is_over<W>(middle)) return middle + 1;"
OVER = "return Completion::is_there(W::template acquire<Scope::System>(word), entry >> completion_bits);"
LANES_TURN = "return WaitCondition{W::template acquire<Scope::Rank>(posted), own[lane], peer_of(lane)};"
TURN_OF_QUEUE = "return WaitCondition{W::template acquire<Scope::Rank>(&producer->posted), own, peer};"
COMPLETED = "return completed_by(W::template acquire<Scope::System>(completion->last_word()), posted);"
LAST_COMPLETED = "return posted - …;"
QUEUE_ACQUIRE = "return W::template acquire<Scope::System>(network<uint64_t>(flag));"
HAS_ENDED = "return ptx::load_acquire_sys(&rank.control->abort) || (rank.polls_report && host_aborted(rank));"
SIGNAL_TO = "warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);"
ACQUIRE_SIGNAL = "return W::template acquire<Scope::System>(own<uint64_t>(flag));"
LINK_ADD = "link->add({…std::function<void()>());"

MUTANTS: Table = {
    ("fabric/cuda/p2p_fabric.h", "p2p"): [
        ("p2p signal_to: the rank's scope", SIGNAL_TO, SYSTEM, RANK),
        ("p2p signal_to: a credit", SIGNAL_TO, "publish<", "credit<"),
        ("p2p credit_to: the rank's scope", "warp.template credit<Scope::System>(at<uint64_t>…;", SYSTEM, RANK),
        ("p2p acquire_signal: the rank's scope", ACQUIRE_SIGNAL, SYSTEM, RANK),
        ("p2p acquire_signal: a plain load", ACQUIRE_SIGNAL, "W::template acquire<Scope::System>", "*"),
    ],
    ("fabric/nccl/nccl_fabric.h", "nccl"): [
        ("nccl put: no fence", "«__threadfence_system();» gin_of(params"),
        ("nccl put: writes are not finished", "«warp.finish_writes();»  // by the copy engine"),
        ("nccl signal: not counted", "params.sent[…] += increment;", "+= increment", "+= 0"),
    ],
    ("fabric/nccl/nccl_fabric.h", "low_latency_nccl"): [
        ("nccl puts of lanes: they do not meet", "«__syncwarp();»  // a lane puts what others have written"),
    ],
    ("launch/nccl/reset_signals.h", "nccl"): [
        ("nccl reset: totals say nothing", "return total > 0 && …;", "total > 0 &&", "total > 0 ||"),
        ("nccl reset: counts stay", "params.sent[number] = 0;"),
    ],
    ("fabric/nvshmem/nvshmem_fabric.h", "nvshmem"): [
        ("nvshmem put: writes are not finished", "«warp.finish_writes();»  // by the copy engine"),
        ("nvshmem signal: no fence", "if (fence) nvshmem_fence();"),
        ("nvshmem signal: a fence that nothing needs", "if (fence) nvshmem_fence();", "(fence)", "(true)"),
        ("nvshmem signal: none", NVSHMEM_ADD),
        ("nvshmem signal: sets", NVSHMEM_ADD, "nvshmemx_signal_op(flag, increment, NVSHMEM_SIGNAL_ADD - 1, rank);"),
        ("nvshmem acquire_signal: the rank's scope", NVSHMEM_ACQUIRE, SYSTEM, RANK),
        ("nvshmem acquire_signal: a plain load", NVSHMEM_ACQUIRE, "W::template acquire<Scope::System>", "*"),
    ],
    ("fabric/nvshmem/nvshmem_fabric.h", "low_latency_nvshmem"): [
        ("nvshmem signals of lanes: no fence", "if (lane == 0) nvshmem_fence();"),
    ],
    ("fabric/queue/send_queue.h", "queue"): [
        ("send queue: not in turn", TURN_OF_QUEUE, "W::template acquire<Scope::Rank>(&producer->posted)", "own"),
        ("send queue: a turn that never came", "if (!is_next || …return false;", "!is_next || ", ""),
        ("send queue: no room is made", "if (!is_next || …return false;", "if (!is_next) return false;"),
        ("send queue: an addition that does not ring", RUNG, "(rings)", "(false)"),
        ("send queue: rung for less", RUNG, "own + 1", "own"),
        ("send queue: a full one is not rung", "«ring(warp, own, false);»  // what waits", ";"),
        ("send queue: the doorbell in the rank's scope", DOORBELL, SYSTEM, RANK),
        ("send queue: the doorbell relaxed", DOORBELL, "publish", "credit"),
        ("send queue: no bell rings", BELL, BELL, ""),
        ("send queue: the bell in the rank's scope", BELL, SYSTEM, RANK),
        ("send queue: the bell relaxed", BELL, "publish", "credit"),
        ("send queue: the bell rings before its record", DOORBELL, f"if (card) {BELL} {DOORBELL}"),
        ("send queue: a card's completions of any round", OVER, "entry >> completion_bits", "0"),
        ("send queue: a card's completions in the rank's scope", OVER, SYSTEM, RANK),
        ("send queue: a card's completions are read relaxed", OVER, "W::template acquire<Scope::System>(", "*("),
        (
            "send queue: a flag by the key of data",
            "return SendEntry::add_of(index, card…;",
            "card->flags",
            "card->data",
        ),
        ("send queue: completions are read relaxed", COMPLETED, "W::template acquire<Scope::System>(", "*("),
        ("send queue: completions in the rank's scope", COMPLETED, SYSTEM, RANK),
        ("send queue: one completion too many", LAST_COMPLETED, "return posted", "return 1 + posted"),
        ("send queue: one completion too few", LAST_COMPLETED, "(posted) - 1 -", "(posted) -"),
    ],
    ("fabric/queue/send_queue.h", "low_latency_queue"): [
        (
            "send queue: a lane's doorbell in the rank's scope",
            "warp.template publish_lanes<Scope::System>(32, [&](int lane, auto&& store) { if (!is_in(…});",
            SYSTEM,
            RANK,
        ),
        ("send queue: no lane's bell rings", LANES_BELL),
        ("send queue: a lane's bell in the rank's scope", LANES_BELL, SYSTEM, RANK),
        ("send queue: a lane's bell relaxed", LANES_BELL, "publish_", "credit_"),
        (
            "send queue: a lane's turn is passed on relaxed",
            "warp.template publish_lanes<Scope::Rank>(32, …});",
            "publish_",
            "credit_",
        ),
        ("send queue: a lane's turn is read relaxed", LANES_TURN, "W::template acquire<Scope::Rank>", "*"),
        ("send queue: a lane not in turn", LANES_TURN, "own[lane],", "0,"),
        (
            "send queue: the turn is passed on relaxed",
            "warp.template publish<Scope::Rank>(&producer…;",
            "publish",
            "credit",
        ),
        ("send queue: the turn is read relaxed", TURN_OF_QUEUE, "W::template acquire<Scope::Rank>(&", "("),
    ],
    ("fabric/queue/send_queue.h", "send_queue"): [
        ("send queue: half of a card's ring passes for all of it", HALF, "middle + 1", "posted"),
        ("send queue: half of a card's ring is one less", HALF, "return middle + 1", "return middle + 2"),
        (
            "send queue: a card is always done with its first entry",
            "return first + card…;",
            "card->template is_over<W>(first)",
            "1",
        ),
    ],
    ("fabric/queue/entry.h", "queue"): [
        ("entry: bytes are not swapped", "result = static_cast<T>(result << 8 …;", "result = value;"),
    ],
    ("fabric/queue/queue_fabric.h", "queue"): [
        ("queue acquire_signal: the rank's scope", QUEUE_ACQUIRE, SYSTEM, RANK),
        ("queue acquire_signal: a plain load", QUEUE_ACQUIRE, "W::template acquire<Scope::System>", "*"),
    ],
    ("exec/device/device_rank.h", "queue"): [
        ("has_ended: hears no host", HAS_ENDED, HAS_ENDED.split(" || ")[0] + ";"),
        ("host_aborted: tells nobody", "if (word) abort_all(rank, word);"),
    ],
    ("protocol/ring.h", "nvshmem"): [
        ("open_rdma_rings: not run empty", "if (F::kOrdersWarps && out…;", "F::kOrdersWarps && ", ""),
    ],
    ("protocol/coordinators.h", "nccl nvshmem"): [
        (
            "sender_coordinator: the signal before the rows",
            "if constexpr (!F::kMapsAll) put_rows(warp, rings, node, from, to); fabric.signal_to…from, to);",
            "fabric.signal_to(warp, channel, args.on_rail(node), args.heap.rdma_tail(channel, args.node()), from, to); "
            "if constexpr (!F::kMapsAll) put_rows(warp, rings, node, from, to);",
        ),
    ],
    ("fabric/verbs/direct_pair.cpp", "direct"): [
        ("direct: completions may not be overrun", "wanted.flags = CqInitAttr::kIgnoreOverrun;"),
        ("direct: completions of any size", "own.entry_bytes = sizeof(Completion);"),
        (
            "direct: any completion in its place is the last",
            "return Completion::entry_of(word) == last …;",
            "return &there;",
        ),
        ("direct: nothing was posted is not idle", "if (last_completion()) return true;"),
        ("direct: the last error is the cause", "if (Completion::is_error(last_word(other)) …;"),
        ("direct: no error is told", "if (!found || …;", 'return "";'),
    ],
    ("fabric/queue/card_link.cpp", "direct"): [
        ("direct: errors after the end of a region count", "if (region.was_closed) continue;"),
        (
            "direct: what is posted after the end of a region is not given up",
            "«stop(region);»  // what is posted later",
            ";",
        ),
        ("direct: a region ends before what was posted there", "if (!region.asked && !is_idle(region)) return false;"),
        ("direct: a region ends before the other side knows", "if (!region.was_confirmed) return false;"),
    ],
    ("fabric/queue/card_link.h", "direct"): [
        ("direct: queue pairs go on after the end", "~CardLink() override { «CardLink::stop();» }"),
    ],
    ("fabric/queue/software_nic.cpp", "direct"): [
        ("direct: a network that starts again keeps its queue pairs", "for (Port::Side& side …is_connected = false;"),
    ],
    ("fabric/queue/software_nic.cpp", "send_queue"): [
        ("nic: all pieces of a write go to its beginning", LINK_ADD, "address + taken.offset", "address"),
        ("nic: all pieces of a write are its first", LINK_ADD, "source + taken.offset", "source"),
        (
            "nic: the rest of a long write is lost",
            LINK_ADD,
            "link->add(",
            "if (taken.offset) { if (is_last) complete(); } else link->add(",
        ),
        ("nic: a signal passes the rest of its write", "taken.begun += is_last;", "++taken.begun; taken.offset = 0;"),
        (
            "nic: signals and credits count twice",
            "add(port->second->heaps_[rank_] + …;",
            "frame.increment",
            "2 * frame.increment",
        ),
    ],
    ("fabric/queue/software_nic_ports.cpp", "direct"): [
        ("direct: nobody watches", "static_cast<CardLink&>(link).open(number, side.pairs);", ";"),
    ],
}
