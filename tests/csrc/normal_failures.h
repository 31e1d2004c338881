#pragma once

#include "normal_grid.h"

// What the kernels do where something is missing or wrong.
namespace ep {

// Two ranks of 8 tokens.
inline Case small_case(bool several_nodes) {
    Case c(1);
    c.topology = several_nodes ? Topology{2, 1} : Topology{1, 2};
    c.format = {64, 0, 4, 2};
    c.heap = {c.topology, 4, 2, align_up(c.format.slot_bytes(), Heap::kLine),
              align_up(c.format.slot_bytes(), Heap::kLine)};
    c.tokens = {8, 8};
    c.peer_warps = c.rdma_warps = c.receivers = 1;
    return c;
}

// These ranks, and what runs on them.
struct TwoRanks {
    Case c;
    Side side;
    Grid grid;
    Notify params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);

    explicit TwoRanks(const Case& of, uint64_t timeout_ns = 60'000'000'000)
        : c(of), side(side_of(of)), grid(c, side, timeout_ns) {}

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

    const ControlBlock& control(int rank) const { return *side.heaps[rank].as<ControlBlock>(); }
    uint64_t* waited() const {
        return reinterpret_cast<uint64_t*>(side.heaps[0].data() + c.heap.waited());
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

  private:
    static Side side_of(const Case& c) {
        Side side;
        for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
        return side;
    }
};

// A ring to rank 1 whose last row has not been read: a call with rows of another size does not
// begin to use it, nor does any where nothing orders the puts of two calls.
inline void run_drain(bool over_network, bool same_size) {
    TwoRanks two(small_case(over_network), 50'000'000);
    const Heap& heap = two.c.heap;
    const auto layouts = layouts_of(two.c, two.side);
    const Tensors none = tensors_of(two.c, 0, 0, 0, 0);
    const DispatchArgs args{transfer_args(two.c, 0, layouts[0], none, 0, 1)};
    const size_t ring = over_network ? heap.rdma_out(0, 1) : heap.nvl_out(0, 0, 1);
    *reinterpret_cast<OutCursor*>(two.side.heaps[0].data() + ring) = {
        1, 1, two.c.format.slot_bytes() / (same_size ? 1 : 2)};
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
    Case c = small_case(true);
    c.random.seed(seed);
    const int count = warps * puts;
    c.heap = {c.topology, 4, 1, Heap::kLine, 4096};
    const Memory rows(count * bytes);
    for (size_t i = 0; i < rows.bytes(); ++i) rows.data()[i] = static_cast<char>(1 + i / 16);
    TwoRanks two(c, 1'000'000'000);
    const size_t data = c.heap.rdma_data(0, 0, 1), flag = c.heap.rdma_tail(0, 0),
                 staging = c.heap.rdma_staging(0, 1, 0);
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
            for (size_t i = lane; i < rows.bytes(); i += 32) {
                if (fabric.template network<char>(data)[i] != rows.data()[i])
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
    TwoRanks two(small_case(true), 50'000'000);
    const auto queue = two.params.fabric.ranks[0].queues.puts(0, 1);
    queue.producer->begun = 1;
    two.run(1, 1, 1, [&](DeviceWarp& warp, auto& fabric, int) {
        fabric.signal_to(warp, 0, 1, two.c.heap.rdma_tail(0, 0), 0, 1);
    });
    if (!two.has_waited_for(Wait::SendQueue, 0, 1))
        simt::die("a turn that never comes is not reported");
    if (queue.rung() || queue.producer->posted) simt::die("an entry is posted out of turn");
}

// A card carries out so many entries and stops: the queue fills, but for the room that these have
// made, and the wait for more ends.
inline void run_full_queue(uint64_t seed, int carried_out) {
    Case c = small_case(true);
    c.random.seed(seed);
    TwoRanks two(c, 300'000'000);
    two.grid.fabric().stop_cards(carried_out);
    const SendQueues& queues = two.params.fabric.ranks[0].queues;
    const int posted = static_cast<int>(queues.depth) + carried_out;
    two.run(1, 1, 1, [&](DeviceWarp& warp, auto& fabric, int) {
        for (int i = 0; i <= posted; ++i)
            fabric.put_to(warp, 0, 1, c.heap.rdma_data(0, 0, 1), c.heap.rdma_staging(0, 1, 0), 16);
    });
    if (!two.has_waited_for(Wait::SendQueue, posted, posted + 1))
        simt::die("a full queue is not reported");
    const auto queue = queues.puts(0, 1);
    if (queue.end_of(*queue.doorbell_word()) != posted) simt::die("a full queue is not rung");
}

// A rank waits for another one while its host hears that a third machine's gave up: the wait ends,
// and the ranks in reach are told.
inline void run_told() {
    TwoRanks two(small_case(true));
    const uint64_t word = ControlBlock::abort_word(Outcome::Failed, 7);
    two.grid.report(0).abort = word;
    two.run(1, 1, 1, [&](DeviceWarp& warp, auto& fabric, int) {
        const size_t flag = two.c.heap.notify_rail_flag(1);
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
    Case c = small_case(false);
    c.random.seed(seed);
    TwoRanks two(c);
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
    TwoRanks two(small_case(false));
    constexpr uint64_t kLate = 20'000'000;  // ns
    uint64_t* flag =
        reinterpret_cast<uint64_t*>(two.side.heaps[0].data() + two.c.heap.nvl_tail(0, 0, 1));
    const uint64_t* waited = two.waited();
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

inline void expect_poison(const std::initializer_list<const Memory*>& outputs, const char* what) {
    for (const Memory* output : outputs) {
        for (size_t i = 0; i < output->bytes(); ++i) {
            if (static_cast<uint8_t>(output->data()[i]) != Outputs::kPoison) simt::die(what);
        }
    }
}

// Of two ranks: the first token of each to the other rank, the next one to this, and so on.
inline std::vector<Inputs> inputs_to_both(Case& c) {
    std::vector<Inputs> inputs;
    for (int rank = 0; rank < 2; ++rank) {
        inputs.push_back(make_inputs(c, c.tokens[rank]));
        for (int i = 0; i < c.tokens[rank] * c.format.topk; ++i) {
            const int to = i / c.format.topk % 2 ? rank : 1 - rank;
            const int expert = 2 * to + i % 2;
            if (c.index_bytes == 8) {
                inputs.back().ids.as<int64_t>()[i] = expert;
            } else {
                inputs.back().ids.as<int32_t>()[i] = expert;
            }
        }
    }
    return inputs;
}

// With room for all rows of a rank that has so many tokens.
inline Tensors tensors_for(const Case& c, int tokens) {
    const size_t rows = tokens * c.format.topk;
    return tensors_of(c, tokens, rows, rows, rows);
}

// Rank 1 of two comes to the notify, but not to the dispatch, or the combine, of `tokens` each:
// nobody can take for data what rank 0 made of it, nor what a rank gets that comes too late; and
// the handle of such a dispatch is refused. Or it does not come to the notify: every wait of rank 0
// ends, says for what it waited, and tells the other rank and the host.
inline void run_given_up(bool several_nodes, bool in_notify, int tokens, bool local_pass) {
    Case with = small_case(several_nodes);
    with.tokens = {tokens, tokens};
    with.format = {66, 12, 4, 2};  // no piece of the outputs is aligned
    const size_t ring = align_up(with.format.slot_bytes(), Heap::kLine);
    with.heap = {with.topology, 4, 2, ring, ring};
    TwoRanks two(with, 50'000'000);
    auto& [c, side, grid, _] = two;
    const std::vector<Inputs> inputs = inputs_to_both(c);
    const auto layouts = layouts_of(c, side);
    auto notify = notify_args(c, inputs, layouts, 0, side);
    if (in_notify) notify.pop_back();
    grid.run(kernels::notify_kernel<Notify>, grid.params<Notify>(notify, c.heap.channels + 1),
             static_cast<int>(notify.size()));
    if ((grid.report(0).abort != 0) != in_notify) simt::die("the wrong step gave up");
    for (int expert = 0; expert < c.heap.local_experts(); ++expert) {
        const int64_t rows = side.counts[0].as<int64_t>()[expert];
        if ((rows == -1) != in_notify) simt::die("numbers of rows that nobody has exchanged");
    }
    if ((layouts[0].totals().overflow != 0) != in_notify)
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
        if (two.waited()[0] || two.waited()[1]) simt::die("a wait that never ended is counted");
    }

    for (int rank = 0; rank < 2; ++rank) side.tensors.push_back(tensors_for(c, tokens));
    std::vector<DispatchArgs> dispatch;
    std::vector<CombineArgs> combine;
    for (int rank = 0; rank < 2; ++rank) {
        const Tensors& t = side.tensors[rank];
        const TransferArgs args =
            transfer_args(c, rank, layouts[rank], t, tokens * c.format.topk, 1);
        dispatch.push_back(dispatch_args(args, inputs[rank], t, local_pass));
        dispatch.back().fills_tables = true;
        combine.push_back(
            {args, t.out.data(), t.out_weights.data(), t.y.data(), t.y_weights.data()});
        combine.back().is_combine = true;
    }
    dispatch.pop_back();
    auto dispatch_params = grid.params_of_roles<Dispatch>(dispatch);
    dispatch_params.ends_call = !local_pass;
    grid.run(kernels::dispatch_kernel<Dispatch>, dispatch_params, 1);
    dispatch_params.ends_call = true;
    if (local_pass) grid.run(kernels::intra_rank_permute_kernel<Dispatch>, dispatch_params, 1);
    if (!grid.report(0).abort) simt::die("rank 0 did without rank 1");
    if (two.control(0).entered.transfer != !in_notify || two.control(0).finished.transfer ||
        two.control(1).entered.transfer)
        simt::die("it cannot be seen who has not come to the dispatch");
    const Tensors& lone = side.tensors[0];
    expect_poison({&lone.out, &lone.out_scales, &lone.out_weights},
                  "what a dispatch that was given up left looks like data");
    if (layouts[0].totals().epoch) simt::die("the handle of a dispatch that was given up is good");
    if (in_notify) return;
    grid.run(kernels::combine_kernel<float, false, Combine>, grid.params_of_roles<Combine>(combine),
             2);
    for (const Tensors& t : side.tensors)
        expect_poison({&t.y, &t.y_weights}, "what a combine after it left looks like data");
    if (!layouts[1].totals().epoch) simt::die("a combine made a handle useless");
}

// The same of a dispatch that exchanges its counts itself, to which rank 1 does not come, or with
// an id that no expert has.
inline void run_fused_given_up(bool is_absent, int tokens) {
    Case with = small_case(false);
    with.tokens = {tokens, tokens};
    TwoRanks two(with, 50'000'000);
    auto& [c, side, grid, _] = two;
    const std::vector<Inputs> inputs = inputs_to_both(c);
    std::memset(inputs[1].ids.data(), 0x7f, c.index_bytes);
    const auto layouts = layouts_of(c, side);
    const auto notify = notify_args(c, inputs, layouts, 0, side);
    std::vector<DispatchCallArgs> args;
    const int ranks = is_absent ? 1 : 2;
    for (int rank = 0; rank < ranks; ++rank) {
        const Tensors& t = side.tensors.emplace_back(tensors_for(c, tokens));
        const TransferArgs transfer =
            transfer_args(c, rank, layouts[rank], t, tokens * c.format.topk, 1);
        args.push_back(fused_args(dispatch_args(transfer, inputs[rank], t), notify[rank]));
    }
    grid.run(kernels::fused_dispatch_kernel<FusedDispatch>,
             grid.params_of_roles<FusedDispatch>(args), ranks);
    const uint64_t reason = ControlBlock::abort_word(
        is_absent ? Outcome::Timeout : Outcome::BadInput, is_absent ? 0 : 1);
    for (int rank = 0; rank < ranks; ++rank) {
        if (grid.report(rank).abort != reason) simt::die("a rank is told another reason");
        if (layouts[rank].totals().epoch)
            simt::die("the handle of a dispatch without counts is good");
        for (int expert = 0; expert < 2 * c.heap.local_experts(); ++expert) {
            if (side.counts[rank].as<int64_t>()[expert] != -1)
                simt::die("numbers of rows that nobody has exchanged");
        }
        const Tensors& t = side.tensors[rank];
        expect_poison({&t.out, &t.out_scales, &t.out_weights},
                      "what came without counts looks like data");
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
    TwoRanks two(small_case(true));
    auto& [c, side, grid, _] = two;
    const Tensors none = tensors_of(c, 0, 0, 0, 0);
    const Memory y(8 * c.format.payload_bytes), weights(8 * c.format.topk * c.format.weight_bytes);
    std::vector<DispatchArgs> dispatch;
    std::vector<CombineArgs> combine;
    const auto layouts = layouts_of(c, side);
    for (int rank = 0; rank < 2; ++rank) {
        const Layout& layout = layouts[rank];
        if (has_layout) {
            std::memset(layout.data, 0, layout.size() * sizeof(int32_t));
            layout.totals().epoch = 1;
            for (int channel = 0; channel < c.heap.channels; ++channel)
                layout.rail(channel, 1 - rank) = 1 << 20;
        }
        dispatch.push_back({transfer_args(c, rank, layout, none, 1 << 20, 1)});
        combine.push_back({transfer_args(c, rank, layout, none, 0, 1)});
        combine.back().is_combine = true;
        combine.back().y = y.data();  // rank 0's: all tokens are for its first expert
        combine.back().y_weights = weights.data();
    }
    const auto run = [&](auto kernel, auto params) {
        params.ends_call = false;  // which would poison outputs
        grid.run(kernel, params, 2);
    };
    is_combine ? run(kernels::combine_kernel<float, false, Combine>,
                     grid.params_of_roles<Combine>(combine))
               : run(kernels::dispatch_kernel<Dispatch>, grid.params_of_roles<Dispatch>(dispatch));
    const Outcome outcome = has_layout ? Outcome::Overflow : Outcome::NoLayout;
    if (ControlBlock::outcome_of(grid.report(0).abort) != outcome ||
        two.incident().outcome != outcome)
        simt::die("a call goes on with an unfit handle");
}

}  // namespace ep
