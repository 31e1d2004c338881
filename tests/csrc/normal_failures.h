#pragma once

#include "normal_grid.h"

// What the kernels do where something is missing or wrong.
namespace ep {

// Of two ranks, with rings of one row.
inline Heap small_heap(bool several_nodes, const RowFormat& format = {64, 0, 4, 2}) {
    const size_t ring = align_up(format.slot_bytes(), Heap::kLine);
    return {several_nodes ? Topology{2, 1} : Topology{1, 2}, 4, 2, ring, ring};
}

// These ranks, and what runs on them.
struct TwoRanks {
    NormalProgram program;
    Grid grid;
    Notify params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);

    explicit TwoRanks(const Heap& heap, uint64_t timeout_ns = 60'000'000'000, uint64_t seed = 1)
        : program(heap), grid(program, seed, timeout_ns) {}

    // A notify, a dispatch and a combine of so many tokens each: the first to the other rank, the
    // next one to this, and so on.
    void add_calls(int tokens, const RowFormat& format = {64, 0, 4, 2}) {
        std::vector<std::vector<int32_t>> ids(2);
        for (const int rank : {0, 1}) {
            for (int token = 0; token < tokens; ++token) {
                const int to = token % 2 ? rank : 1 - rank;
                ids[rank].insert(ids[rank].end(), {2 * to, 2 * to + 1});
            }
        }
        program.add_handle({format.topk}, ids);
        for (const auto kind : {NormalProgram::Kind::Dispatch, NormalProgram::Kind::Combine})
            program.add({kind, 0, DType::bf16, format});
        for (const int rank : {0, 1}) {
            dispatched(rank).dispatch.has_intra_rank_pass = false;
            combined(rank).combine.sums = nullptr;
        }
    }
    NormalProgram::Share& share(int rank) { return program.handles[0].shares[rank]; }
    const Layout& layout(int rank) { return share(rank).notify.layout; }
    NormalProgram::Part& dispatched(int rank) { return program.parts[1][rank]; }
    NormalProgram::Part& combined(int rank) { return program.parts[2][rank]; }

    // By the first ranks. ends_call: whether outputs are poisoned after a failure.
    void dispatch(int ranks, bool ends_call = true) {
        std::vector<DispatchArgs> args;
        for (int rank = 0; rank < ranks; ++rank) args.push_back(dispatched(rank).dispatch);
        const bool passes = args[0].has_intra_rank_pass;
        auto params = grid.params_of_roles<Dispatch>(args);
        params.ends_call = ends_call && !passes;
        grid.run(kernels::dispatch_kernel<Dispatch>, params, ranks);
        params.ends_call = ends_call;
        if (passes) grid.run(kernels::intra_rank_permute_kernel<Dispatch>, params, ranks);
    }
    void combine(bool ends_call = true) {
        auto params =
            grid.params_of_roles<Combine>(std::vector{combined(0).combine, combined(1).combine});
        params.ends_call = ends_call;
        grid.run(kernels::combine_kernel<BFloat16, false, Combine>, params, 2);
    }

    // f(warp, fabric, rank) on so many warps of these ranks, from 0 on.
    template <class F>
    void run(int ranks, int warps, uint64_t seed, F&& f) {
        simt::run(ranks, 1, 32 * warps, seed, [&] {
            const int rank = static_cast<int>(blockIdx.x);
            Notify::Fabric fabric(params.fabric, rank);
            DeviceWarp warp(params.ranks[rank], 1, Role::Notify, threadIdx.x / 32,
                            kernels::bulk_buffers());
            f(warp, fabric, rank);
        });
        ptx::end_of_launch();
    }

    const ControlBlock& control(int rank) const { return *program.states[rank].control; }
    template <class T>
    T* at(int rank, size_t offset) const {
        return reinterpret_cast<T*>(program.heaps[rank] + offset);
    }
    // What rank 0 says.
    const Incident& incident() const { return grid.report(0).incidents[0]; }
    bool has_waited_for(Wait wait, uint64_t seen, uint64_t expected) const {
        const Incident& found = incident();
        return found.outcome == Outcome::Timeout && found.wait == wait && found.rank == 0 &&
               found.peer == 1 && found.seen == seen && found.expected == expected;
    }
    void expect_told(uint64_t word) const {
        if (grid.report(0).abort != word) simt::die("the host is not told that a rank gave up");
        if (control(0).abort != word || control(1).abort != word)
            simt::die("a rank is not told that another gave up");
    }
};

// A ring to rank 1 whose last row has not been read: a call with rows of another size does not
// begin to use it, nor does any where nothing orders the puts of two calls.
inline void run_drain(bool over_network, bool same_size) {
    TwoRanks two(small_heap(over_network), 50'000'000);
    two.add_calls(8);
    const DispatchArgs& args = two.dispatched(0).dispatch;
    const Heap& heap = args.heap;
    const size_t ring = over_network ? heap.rdma_out(0, 1) : heap.nvl_out(0, 0, 1);
    *two.at<OutCursor>(0, ring) = {1, 1, args.format.slot_bytes() / (same_size ? 1 : 2)};
    two.run(1, 1, 1, [&](DeviceWarp& warp, auto& fabric, int) {
        const Rings<Dispatch::Fabric> rings{fabric, args, 0};
        over_network ? open_rdma_rings(warp, rings, 0, 1)
                     : open_nvl_rings(warp, rings, 2, [](int rank) { return rank; });
    });
    const bool drains = !same_size || (over_network && !Ranks::Params::Fabric::kOrdersWarps);
    const Wait wait = over_network ? Wait::RdmaDrain : Wait::NvlDrain;
    if (two.incident().wait != (drains ? wait : Wait::None))
        simt::die("a ring is not opened as it should be");
}

// Warps of rank 0 put rows, each with a signal after it: all are there when the flag is as high as
// all together raise it. Rows of 4 KB are written by the copy engine; warps that share a queue take
// turns.
inline void run_puts(uint64_t seed, int warps, int puts, size_t bytes) {
    const int count = warps * puts;
    const Heap heap{{2, 1}, 4, 1, Heap::kLine, 4096};
    Tensor<char> rows(count * bytes);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<char>(1 + i / 16);
    TwoRanks two(heap, 1'000'000'000, seed);
    const size_t data = heap.rdma_data(0, 0, 1), flag = heap.rdma_tail(0, 0),
                 staging = heap.rdma_staging(0, 1, 0);
    two.run(2, warps, seed, [&](DeviceWarp& warp, auto& fabric, int rank) {
        const int own = static_cast<int>(threadIdx.x / 32);
        for (int i = own * puts; rank == 0 && i < (own + 1) * puts; ++i) {
            const size_t at = i * bytes;
            warp.copy<CacheHint::Keep>(fabric.template network<char>(staging + at),
                                       rows.data() + at, bytes);
            fabric.put_to(warp, 0, 1, data + at, staging + at, bytes);
            fabric.signal_to(warp, 0, 1, flag, 0, 1);
        }
        if (rank == 0 || own) return;
        warp.wait_all(Wait::RdmaRow, 1, [&](int) {
            const uint64_t found = fabric.template acquire_signal<DeviceWarp>(0, flag);
            return WaitCondition{found, static_cast<uint64_t>(count), 0};
        });
        warp.lanes(32, [&](int lane) {
            for (size_t i = lane; i < rows.size(); i += 32) {
                if (fabric.template network<char>(data)[i] != rows[i])
                    simt::die("a flag without its row");
            }
        });
    });
    two.grid.check_reports();
}

#if defined(OVER_QUEUE)
// A warp has a number of a queue's and posts no entry: the turn of the one after it never comes,
// and it posts nothing.
inline void run_lost_turn() {
    TwoRanks two(small_heap(true), 50'000'000);
    const auto queue = two.params.fabric.ranks[0].queues.puts(0, 1);
    queue.producer->begun = 1;
    two.run(1, 1, 1, [&](DeviceWarp& warp, auto& fabric, int) {
        fabric.signal_to(warp, 0, 1, two.program.heap.rdma_tail(0, 0), 0, 1);
    });
    if (!two.has_waited_for(Wait::SendQueue, 0, 1))
        simt::die("a turn that never comes is not reported");
    if (queue.rung() || queue.producer->posted) simt::die("an entry is posted out of turn");
}

// A card carries out so many entries and stops: the queue fills, but for the room that these have
// made, and the wait for more ends.
inline void run_full_queue(uint64_t seed, int carried_out) {
    const Heap heap = small_heap(true);
    TwoRanks two(heap, 300'000'000, seed);
    two.grid.fabric().stop_cards(carried_out);
    const SendQueues& queues = two.params.fabric.ranks[0].queues;
    const int posted = static_cast<int>(queues.depth) + carried_out;
    two.run(1, 1, 1, [&](DeviceWarp& warp, auto& fabric, int) {
        for (int i = 0; i <= posted; ++i)
            fabric.put_to(warp, 0, 1, heap.rdma_data(0, 0, 1), heap.rdma_staging(0, 1, 0), 16);
    });
    if (!two.has_waited_for(Wait::SendQueue, posted, posted + 1))
        simt::die("a full queue is not reported");
    const auto queue = queues.puts(0, 1);
    if (queue.end_of(*queue.doorbell_word()) != posted) simt::die("a full queue is not rung");
}

// A rank waits for another one while its host hears that a third machine's gave up: the wait ends,
// and the ranks in reach are told.
inline void run_told() {
    TwoRanks two(small_heap(true));
    const uint64_t word = ControlBlock::abort_word(Outcome::Failed, 7);
    two.grid.report(0).abort = word;
    two.run(1, 1, 1, [&](DeviceWarp& warp, auto& fabric, int) {
        const size_t flag = two.program.heap.notify_rail_flag(1);
        const auto need = [&](int) {
            return WaitCondition{fabric.template acquire_signal<DeviceWarp>(0, flag), 1, 1};
        };
        if (warp.wait_all(Wait::NotifyRail, 1, need)) simt::die("a wait for nothing is met");
    });
    if (two.incident().outcome != Outcome::Aborted)
        simt::die("what the host has heard ends no wait");
    two.expect_told(word);
}
#endif

// Rank 1 finds its abort word set: then it can read what rank 0 was waiting for, whole.
inline void run_incident(uint64_t seed) {
    TwoRanks two(small_heap(false), 60'000'000'000, seed);
    const ControlBlock& block = two.control(0);
    // of one lane's writes only those before its warp last met are known to be released
    simt::order::ignore(block.incidents, sizeof(block.incidents));
    two.run(2, 1, seed, [&](DeviceWarp& warp, auto&, int rank) {
        if (rank == 0) return warp.fail(Outcome::Mismatch, Wait::None, WaitCondition{11, 12, 1});
        warp.lanes(1, [&](int) {
            while (!ptx::load_acquire_sys(&two.control(1).abort)) simt::yield();
            if (!ptx::load_acquire_sys(&block.complete[0]) || block.incidents[0].expected != 12 ||
                !two.grid.report(0).complete[0])
                simt::die("a rank is told that another gave up before it can see why");
        });
    });
}

// Only what a wait took that lasted is counted, and only for the rank that was missing in the end.
inline void run_waits() {
    TwoRanks two(small_heap(false));
    constexpr uint64_t kLate = 20'000'000;  // ns
    uint64_t* flag = two.at<uint64_t>(0, two.program.heap.nvl_tail(0, 0, 1));
    const uint64_t* waited = two.grid.waited(0);
    two.run(2, 1, 1, [&](DeviceWarp& warp, auto&, int rank) {
        const auto need = [&](int lane) {
            if (lane == 0) return WaitCondition{1, 1, 0};
            return WaitCondition{DeviceWarp::acquire<Scope::System>(flag), 1, 1};
        };
        if (rank == 0) {
            warp.wait_all(Wait::NvlRow, 2, need);
            const uint64_t once = ptx::load_relaxed_sys(waited + 1);
            warp.wait_all(Wait::NvlRow, 2, need);
            if (ptx::load_relaxed_sys(waited + 1) != once) simt::die("a met wait is counted");
            return;
        }
        warp.lanes(1, [&](int) {
            const uint64_t start = ptx::globaltimer();
            // and so many turns that the other rank has long begun to measure
            for (int turns = 0; turns < 1000 || ptx::globaltimer() - start < kLate; ++turns)
                simt::yield();
            ptx::store_release_sys(flag, 1);
        });
    });
    if (waited[1] < kLate / 2 || waited[0]) simt::die("a wait is not counted for the right rank");
}

inline void expect_poison(const NormalProgram::Part& part, const char* what) {
    for (const auto* output : {&part.out, &part.out_scales, &part.out_weights}) {
        for (const char byte : *output) {
            if (static_cast<uint8_t>(byte) != Outputs::kPoison) simt::die(what);
        }
    }
}

// Rank 1 of two comes to the notify, but not to the dispatch, or the combine, of `tokens` each:
// nobody can take for data what rank 0 made of it, nor what a rank gets that comes too late; and
// the handle of such a dispatch is refused. Or it does not come to the notify: every wait of rank 0
// ends, says for what it waited, and tells the other rank and the host.
inline void run_given_up(bool several_nodes, bool in_notify, int tokens, bool local_pass) {
    const RowFormat format{66, 12, 4, 2};  // no piece of the outputs is aligned
    TwoRanks two(small_heap(several_nodes, format), 50'000'000);
    Grid& grid = two.grid;
    two.add_calls(tokens, format);
    std::vector notify{two.share(0).notify, two.share(1).notify};
    if (in_notify) notify.pop_back();
    grid.run(kernels::notify_kernel<Notify>,
             grid.params<Notify>(notify, two.program.heap.channels + 1),
             static_cast<int>(notify.size()));
    if ((grid.report(0).abort != 0) != in_notify) simt::die("the wrong step gave up");
    for (const int64_t rows : two.share(0).counts) {
        if ((rows == -1) != in_notify) simt::die("numbers of rows that nobody has exchanged");
    }
    if ((two.layout(0).totals().overflow != 0) != in_notify)
        simt::die("no overflow where nobody knows the rows");
    if (in_notify) {
        const Wait wait = several_nodes ? Wait::NotifyRail : Wait::NotifyNode;
        if (!two.has_waited_for(wait, 0, 1) || two.incident().role != Role::Notify ||
            grid.report(0).incidents[1].outcome != Outcome::Ok)
            simt::die("the wait for an absent rank is not reported as it was");
        two.expect_told(ControlBlock::abort_word(Outcome::Timeout, 0));
        if (two.control(0).entered.notify != 1 || two.control(0).finished.notify ||
            two.control(1).entered.notify)
            simt::die("it cannot be seen who has not come");
        if (grid.waited(0)[0] || grid.waited(0)[1]) simt::die("a wait that never ended is counted");
    }

    two.dispatched(0).dispatch.has_intra_rank_pass = local_pass;
    two.dispatch(1);
    if (!grid.report(0).abort) simt::die("rank 0 did without rank 1");
    if (two.control(0).entered.transfer != !in_notify || two.control(0).finished.transfer ||
        two.control(1).entered.transfer)
        simt::die("it cannot be seen who has not come to the dispatch");
    expect_poison(two.dispatched(0), "what a dispatch that was given up left looks like data");
    if (two.layout(0).totals().epoch)
        simt::die("the handle of a dispatch that was given up is good");
    if (in_notify) return;
    two.combine();
    for (const int rank : {0, 1})
        expect_poison(two.combined(rank), "what a combine after it left looks like data");
    if (!two.layout(1).totals().epoch) simt::die("a combine made a handle useless");
}

// The same of a dispatch that exchanges its counts itself, to which rank 1 does not come, or with
// an id that no expert has.
inline void run_fused_given_up(bool is_absent, int tokens) {
    TwoRanks two(small_heap(false), 50'000'000);
    Grid& grid = two.grid;
    two.add_calls(tokens);
    two.share(1).ids[0] = 0x7f7f7f7f;
    std::vector<DispatchCallArgs> args;
    const int ranks = is_absent ? 1 : 2;
    for (int rank = 0; rank < ranks; ++rank)
        args.push_back({two.dispatched(rank).dispatch, two.share(rank).notify});
    grid.run(kernels::fused_dispatch_kernel<FusedDispatch>,
             grid.params_of_roles<FusedDispatch>(args), ranks);
    const uint64_t reason = ControlBlock::abort_word(
        is_absent ? Outcome::Timeout : Outcome::BadInput, is_absent ? 0 : 1);
    for (int rank = 0; rank < ranks; ++rank) {
        if (grid.report(rank).abort != reason) simt::die("a rank is told another reason");
        if (two.layout(rank).totals().epoch)
            simt::die("the handle of a dispatch without counts is good");
        for (const int64_t rows : two.share(rank).counts) {
            if (rows != -1) simt::die("numbers of rows that nobody has exchanged");
        }
        expect_poison(two.dispatched(rank), "what came without counts looks like data");
    }
    for (int rank = 0; rank < 2; ++rank) {
        const ControlBlock& block = two.control(rank);
        const uint64_t came = rank == 0;  // whose ids are wrong does not
        if (block.entered.notify != came || block.entered.transfer != came ||
            block.finished.notify || block.finished.transfer)
            simt::die("it cannot be seen who has not come to a dispatch with its counts");
    }
}

// What a handle of a call that failed may hold: a layout that was never made, or tables that are
// too small. Nothing is read or written through them, and the host is told why.
inline void run_unfit(bool is_combine, bool has_layout) {
    TwoRanks two(small_heap(true));
    two.add_calls(8);
    for (const int rank : {0, 1}) {
        const Layout& layout = two.layout(rank);
        layout.totals().epoch = has_layout;
        for (int channel = 0; has_layout && channel < two.program.heap.channels; ++channel)
            layout.rail(channel, 1 - rank) = 1 << 20;
        TransferArgs &dispatch = two.dispatched(rank).dispatch,
                     &combine = two.combined(rank).combine;
        dispatch.max_received = dispatch.max_rail = 0;
        combine.max_received = combine.max_rail = 0;
    }
    is_combine ? two.combine(false) : two.dispatch(2, false);
    const Outcome outcome = has_layout ? Outcome::Overflow : Outcome::NoLayout;
    if (ControlBlock::outcome_of(two.grid.report(0).abort) != outcome ||
        two.incident().outcome != outcome)
        simt::die("a call goes on with an unfit handle");
}

}  // namespace ep
