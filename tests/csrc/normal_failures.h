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

// Rank 0 of two runs alone: every wait ends, says for what it waited, and tells the other rank and
// the host.
inline void run_absent(bool several_nodes) {
    Case c = small_case(several_nodes);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    std::vector<Inputs> inputs;
    for (const int tokens : c.tokens) inputs.push_back(make_inputs(c, tokens));
    const auto layouts = layouts_of(c, side);
    Grid grid(c, side, 50'000'000);
    auto notify = notify_args(c, inputs, layouts, 0, side);
    notify.pop_back();
    const auto params = grid.params<Notify>(notify, c.heap.channels + 1);
    grid.run(kernels::notify_kernel<Notify>, params, 1);
    const ControlBlock& report = grid.report(0);
    const Wait wait = several_nodes ? Wait::NotifyRail : Wait::NotifyNode;
    const Incident& incident = report.incidents[0];
    const bool named = incident.outcome == Outcome::Timeout && incident.role == Role::Notify &&
                       incident.wait == wait && incident.rank == 0 && incident.peer == 1 &&
                       incident.seen == 0 && incident.expected == 1;
    if (!named || report.incidents[1].outcome != Outcome::Ok)
        simt::die("the wait for an absent rank is not reported as it was");
    for (const Memory& heap : side.heaps) {
        if (heap.as<ControlBlock>()->abort != ControlBlock::abort_word(Outcome::Timeout, 0))
            simt::die("a rank is not told that another gave up");
    }
    if (report.abort != ControlBlock::abort_word(Outcome::Timeout, 0))
        simt::die("the host is not told that a rank gave up");
    const ControlBlock* blocks[] = {side.heaps[0].as<ControlBlock>(),
                                    side.heaps[1].as<ControlBlock>()};
    const bool is_counted = blocks[0]->entered.notify == 1 && blocks[0]->finished.notify == 0 &&
                            blocks[1]->entered.notify == 0;
    if (!is_counted) simt::die("it cannot be seen who has not come");
    const uint64_t* waited = reinterpret_cast<uint64_t*>(side.heaps[0].data() + c.heap.waited());
    if (waited[0] || waited[1]) simt::die("a wait that never ended is counted");
}

template <bool kNetwork, class L>
void open_ring(const L params) {
    typename L::Fabric fabric(params.fabric, 0);
    DeviceWarp warp(params.ranks[0], 1, Role::RdmaSender, 0, kernels::bulk_buffers());
    const Rings<typename L::Fabric> rings{fabric, params.args[0], 0};
    kNetwork ? open_rdma_rings(warp, rings, 0, 1)
             : open_nvl_rings(warp, rings, 2, [](int rank) { return rank; });
}

// A ring to rank 1 whose last row has not been read: a call with rows of another size does not
// begin to use it, nor does any where nothing orders the puts of two calls.
template <bool kNetwork>
void run_drain(bool same_size) {
    Case c = small_case(kNetwork);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    const auto layouts = layouts_of(c, side);
    const Tensors none{Memory(0), Memory(0), Memory(0), Memory(0),
                       Memory(0), Memory(0), Memory(0), Memory(0)};
    Grid grid(c, side, 50'000'000);
    const std::vector<DispatchArgs> args{{transfer_args(c, 0, layouts[0], none, 0, 1)}};
    const size_t ring = kNetwork ? c.heap.rdma_out(0, 1) : c.heap.nvl_out(0, 0, 1);
    *reinterpret_cast<OutCursor*>(side.heaps[0].data() + ring) = {
        1, 1, c.format.slot_bytes() / (same_size ? 1 : 2)};
    grid.run(open_ring<kNetwork, Dispatch>, grid.params<Dispatch>(args, 1), 1, 32);
    const Incident& incident = grid.report(0).incidents[0];
    const bool drains = !same_size || (kNetwork && !Ranks::Params::Fabric::kOrdersWarps);
    if (incident.wait != (!drains ? Wait::None : kNetwork ? Wait::RdmaDrain : Wait::NvlDrain))
        simt::die("a ring is not opened as it should be");
}

// A row that the copy engine has written is put, and its flag after it: the other node finds it.
inline void run_put(uint64_t seed) {
    constexpr size_t kBytes = 4096;
    Case c = small_case(true);
    c.random.seed(seed);
    c.heap = {c.topology, 4, 1, Heap::kLine, kBytes};
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    const Memory row(kBytes, 0x12);
    Grid grid(c, side, 1'000'000'000);
    const auto params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);
    simt::run(2, 1, 32, seed, [&] {
        const int rank = static_cast<int>(blockIdx.x);
        Notify::Fabric fabric(params.fabric, rank);
        DeviceWarp warp(params.ranks[rank], 1, Role::SenderCoordinator, 0, kernels::bulk_buffers());
        const size_t data = c.heap.rdma_data(0, 0, 1), flag = c.heap.rdma_tail(0, 0);
        if (rank == 0) {
            const size_t staging = c.heap.rdma_staging(0, 1, 0);
            warp.copy<CacheHint::Keep>(fabric.network<char>(staging), row.data(), kBytes);
            fabric.put_to(warp, 0, 1, data, staging, kBytes);
            fabric.signal_to(warp, 0, 1, flag, 0, 1);
            return;
        }
        warp.wait_all(Wait::RdmaRow, 1, [&](int) {
            return WaitCondition{fabric.acquire_signal<DeviceWarp>(0, flag), 1, 0};
        });
        warp.lanes(32, [&](int lane) {
            for (size_t i = lane; i < kBytes; i += 32) {
                if (fabric.network<char>(data)[i] != row.data()[i])
                    simt::die("a flag without its row");
            }
        });
    });
    ptx::end_of_launch();
}

#if defined(OVER_QUEUE)
// Warps of a rank that post in one queue at the same time, take turns: what each has put is there
// when the flag is as high as all of them together raise it.
inline void run_turns(uint64_t seed) {
    constexpr size_t kBytes = 4096, kPart = 16;
    constexpr int kWarps = 4, kPuts = 3;
    Case c = small_case(true);
    c.random.seed(seed);
    c.heap = {c.topology, 4, 1, Heap::kLine, kBytes};
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    Grid grid(c, side, 1'000'000'000);
    const auto params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);
    simt::run(2, 1, 32 * kWarps, seed, [&] {
        const int rank = static_cast<int>(blockIdx.x), own = static_cast<int>(threadIdx.x / 32);
        Notify::Fabric fabric(params.fabric, rank);
        DeviceWarp warp(params.ranks[rank], 1, Role::SenderCoordinator, own,
                        kernels::bulk_buffers());
        const size_t data = c.heap.rdma_data(0, 0, 1), flag = c.heap.rdma_tail(0, 0);
        if (rank == 0) {
            const size_t staging = c.heap.rdma_staging(0, 1, 0);
            for (int i = own * kPuts; i < (own + 1) * kPuts; ++i) {
                warp.lanes(kPart, [&](int lane) {
                    fabric.network<char>(staging + i * kPart)[lane] = static_cast<char>(i + 1);
                });
                fabric.put_to(warp, 0, 1, data + i * kPart, staging + i * kPart, kPart);
                fabric.signal_to(warp, 0, 1, flag, 0, 1);
            }
        } else if (own == 0) {
            warp.wait_all(Wait::RdmaRow, 1, [&](int) {
                const auto found = fabric.acquire_signal<DeviceWarp>(0, flag);
                return WaitCondition{found, kWarps * kPuts, 0};
            });
            warp.lanes(32, [&](int lane) {
                for (size_t i = lane; i < kWarps * kPuts * kPart; i += 32) {
                    if (fabric.network<char>(data)[i] != static_cast<char>(i / kPart + 1))
                        simt::die("what a warp has put is not there");
                }
            });
        }
    });
    ptx::end_of_launch();
    grid.check_reports();
}

// A warp has a number of a queue's and posts no entry: the turn of the one after it never comes,
// and it posts nothing.
inline void run_lost_turn() {
    Case c = small_case(true);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    Grid grid(c, side, 50'000'000);
    const auto params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);
    const auto queue = params.fabric.ranks[0].queues.puts(0, 1);
    queue.producer->begun = 1;
    simt::run(1, 1, 32, 1, [&] {
        Notify::Fabric fabric(params.fabric, 0);
        DeviceWarp warp(params.ranks[0], 1, Role::SenderCoordinator, 0, kernels::bulk_buffers());
        fabric.signal_to(warp, 0, 1, c.heap.rdma_tail(0, 0), 0, 1);
    });
    ptx::end_of_launch();
    const Incident& incident = grid.report(0).incidents[0];
    if (incident.outcome != Outcome::Timeout || incident.wait != Wait::SendQueue ||
        incident.peer != 1 || incident.seen != 0 || incident.expected != 1)
        simt::die("a turn that never comes is not reported");
    if (queue.rung() || queue.producer->posted) simt::die("an entry is posted out of turn");
}

// A card carries out so many entries and stops: the queue fills, but for the room that these have
// made, and the wait for more ends.
inline void run_full_queue(uint64_t seed, int carried_out) {
    Case c = small_case(true);
    c.random.seed(seed);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    Grid grid(c, side, 300'000'000);
    grid.fabric().stop_cards(carried_out);
    const auto params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);
    const int depth = static_cast<int>(params.fabric.ranks[0].queues.depth);
    simt::run(1, 1, 32, 1, [&] {
        Notify::Fabric fabric(params.fabric, 0);
        DeviceWarp warp(params.ranks[0], 1, Role::SenderCoordinator, 0, kernels::bulk_buffers());
        const size_t data = c.heap.rdma_data(0, 0, 1), staging = c.heap.rdma_staging(0, 1, 0);
        for (int i = 0; i <= depth + carried_out; ++i) fabric.put_to(warp, 0, 1, data, staging, 16);
    });
    ptx::end_of_launch();
    const Incident& incident = grid.report(0).incidents[0];
    const auto posted = static_cast<uint64_t>(depth + carried_out);
    if (incident.outcome != Outcome::Timeout || incident.wait != Wait::SendQueue ||
        incident.peer != 1 || incident.seen != posted || incident.expected != posted + 1)
        simt::die("a full queue is not reported");
    const auto queue = params.fabric.ranks[0].queues.puts(0, 1);
    if (queue.end_of(*queue.doorbell_word()) != posted) simt::die("a full queue is not rung");
}

// A rank waits for another one while its host hears that a third machine's gave up: the wait ends,
// and the ranks in reach are told.
inline void run_told() {
    Case c = small_case(true);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    Grid grid(c, side);
    const auto params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);
    const uint64_t word = ControlBlock::abort_word(Outcome::Failed, 7);
    grid.report(0).abort = word;
    simt::run(1, 1, 32, 1, [&] {
        Notify::Fabric fabric(params.fabric, 0);
        DeviceWarp warp(params.ranks[0], 1, Role::Notify, 0, kernels::bulk_buffers());
        const size_t flag = c.heap.notify_rail_flag(1);
        const auto need = [&](int) {
            return WaitCondition{fabric.acquire_signal<DeviceWarp>(0, flag), 1, 1};
        };
        if (warp.wait_all(Wait::NotifyRail, 1, need)) simt::die("a wait for nothing is met");
    });
    ptx::end_of_launch();
    if (grid.report(0).incidents[0].outcome != Outcome::Aborted || grid.report(0).abort != word)
        simt::die("what the host has heard ends no wait");
    for (const Memory& heap : side.heaps) {
        if (heap.as<ControlBlock>()->abort != word) simt::die("a rank is not told");
    }
}
#endif

// Rank 1 finds its abort word set: then it can read what rank 0 was waiting for, whole.
inline void run_incident(uint64_t seed) {
    Case c = small_case(false);
    c.random.seed(seed);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    Grid grid(c, side);
    const auto params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);
    ControlBlock* blocks[] = {side.heaps[0].as<ControlBlock>(), side.heaps[1].as<ControlBlock>()};
    // of one lane's writes only those before its warp last met are known to be released
    simt::order::ignore(blocks[0]->incidents, sizeof(blocks[0]->incidents));
    simt::run(2, 1, 32, seed, [&] {
        const DeviceRank& rank = params.ranks[blockIdx.x];
        DeviceWarp warp(rank, 7, Role::Receiver, 0, kernels::bulk_buffers());
        if (rank.rank == 0)
            return warp.fail(Outcome::Mismatch, Wait::None, WaitCondition{11, 12, 1});
        warp.lanes(1, [&](int) {
            while (!ptx::load_acquire_sys(&rank.control->abort)) simt::yield();
            const Incident& incident = blocks[0]->incidents[0];
            if (!ptx::load_acquire_sys(&blocks[0]->complete[0]) || incident.expected != 12 ||
                !grid.report(0).complete[0])
                simt::die("a rank is told that another gave up before it can see why");
        });
    });
}

// Only what a wait took that lasted is counted, and only for the rank that was missing in the end.
inline void run_waits() {
    Case c = small_case(false);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    Grid grid(c, side);
    const auto params = grid.params<Notify>(std::vector<NotifyArgs>(2), 1);
    constexpr uint64_t kLate = 20'000'000;  // ns
    char* heap = side.heaps[0].data();
    uint64_t* flag = reinterpret_cast<uint64_t*>(heap + c.heap.nvl_tail(0, 0, 1));
    const uint64_t* waited = reinterpret_cast<uint64_t*>(heap + c.heap.waited());
    simt::run(2, 1, 32, 1, [&] {
        const DeviceRank& rank = params.ranks[blockIdx.x];
        DeviceWarp warp(rank, 7, Role::Receiver, 0, kernels::bulk_buffers());
        const auto need = [&](int lane) {
            if (lane == 0) return WaitCondition{1, 1, 0};
            return WaitCondition{DeviceWarp::acquire<Scope::System>(flag), 1, 1};
        };
        if (rank.rank == 0) {
            warp.wait_all(Wait::NvlRow, 2, need);
            const uint64_t once = ptx::load_relaxed_sys(waited + 1);
            warp.wait_all(Wait::NvlRow, 2, need);
            if (ptx::load_relaxed_sys(waited + 1) != once) simt::die("a met wait is counted");
        } else {
            warp.lanes(1, [&](int) {
                const uint64_t start = ptx::globaltimer();
                // and so many turns that the other rank has long begun to measure
                for (int turns = 0; turns < 1000 || ptx::globaltimer() - start < kLate; ++turns)
                    simt::yield();
                ptx::store_release_sys(flag, 1);
            });
        }
    });
    if (waited[1] < kLate / 2 || waited[0]) simt::die("a wait is not counted for the right rank");
}

inline bool is_poison(const Memory& memory) {
    return std::all_of(memory.data(), memory.data() + memory.bytes(),
                       [](char byte) { return static_cast<uint8_t>(byte) == Outputs::kPoison; });
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
    return {Memory(0),
            Memory(rows * c.format.topk * sizeof(int32_t), 0x22),
            Memory(rows * c.format.topk * sizeof(int32_t), 0x22),
            Memory(rows * c.format.payload_bytes, 0x33),
            Memory(rows * c.format.scale_bytes, 0x33),
            Memory(rows * c.format.weight_bytes, 0x33),
            Memory(tokens * c.format.payload_bytes, 0x44),
            Memory(rows * c.format.weight_bytes, 0x44)};
}

// Rank 1 of two comes to the notify, but not to the dispatch, or the combine, of `tokens` each:
// nobody can take for data what rank 0 made of it, nor what a rank gets that comes too late; and
// the handle of such a dispatch is refused.
inline void run_given_up(bool several_nodes, bool in_notify, int tokens, bool local_pass) {
    Case c = small_case(several_nodes);
    c.tokens = {tokens, tokens};
    c.format = {66, 12, 4, 2};  // no piece of the outputs is aligned
    c.heap = {c.topology, 4, 2, align_up(c.format.slot_bytes(), Heap::kLine),
              align_up(c.format.slot_bytes(), Heap::kLine)};
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes());
    const std::vector<Inputs> inputs = inputs_to_both(c);
    const auto layouts = layouts_of(c, side);
    Grid grid(c, side, 50'000'000);
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

    const size_t rows = tokens * c.format.topk;
    for (int rank = 0; rank < 2; ++rank) side.tensors.push_back(tensors_for(c, tokens));
    std::vector<DispatchArgs> dispatch;
    std::vector<CombineArgs> combine;
    for (int rank = 0; rank < 2; ++rank) {
        const Tensors& t = side.tensors[rank];
        TransferArgs args = transfer_args(c, rank, layouts[rank], t, rows, 1);
        args.fills_tables = true;
        const Inputs& in = inputs[rank];
        dispatch.push_back({args, in.x.data(), in.scales.data(), in.weights.data(), t.out.data(),
                            t.out_scales.data(), t.out_weights.data(), local_pass});
        args.is_combine = true;
        args.fills_tables = false;
        combine.push_back(
            {args, t.out.data(), t.out_weights.data(), t.y.data(), t.y_weights.data()});
    }
    const std::vector<DispatchArgs> alone{dispatch[0]};
    const auto dispatch_roles = grid.roles<DispatchRoles>();
    auto dispatch_params = grid.params<Dispatch>(alone, dispatch_roles.warps() * c.heap.channels);
    dispatch_params.roles = dispatch_roles;
    dispatch_params.ends_call = !local_pass;
    grid.run(kernels::dispatch_kernel<Dispatch>, dispatch_params, 1);
    dispatch_params.ends_call = true;
    if (local_pass) grid.run(kernels::intra_rank_permute_kernel<Dispatch>, dispatch_params, 1);
    if (!grid.report(0).abort) simt::die("rank 0 did without rank 1");
    const ControlBlock* blocks[] = {side.heaps[0].as<ControlBlock>(),
                                    side.heaps[1].as<ControlBlock>()};
    const bool is_counted = blocks[0]->entered.transfer == !in_notify &&
                            blocks[0]->finished.transfer == 0 && blocks[1]->entered.transfer == 0;
    if (!is_counted) simt::die("it cannot be seen who has not come to the dispatch");
    const Tensors& lone = side.tensors[0];
    for (const Memory* memory : {&lone.out, &lone.out_scales, &lone.out_weights}) {
        if (!is_poison(*memory))
            simt::die("what a dispatch that was given up left looks like data");
    }
    if (layouts[0].totals().epoch) simt::die("the handle of a dispatch that was given up is good");
    if (in_notify) return;
    const auto roles = grid.roles<CombineRoles>();
    auto all = grid.params<Combine>(combine, roles.warps() * c.heap.channels);
    all.roles = roles;
    all.ends_call = true;
    grid.run(kernels::combine_kernel<float, false, Combine>, all, 2);
    for (const Tensors& t : side.tensors) {
        if (!is_poison(t.y) || !is_poison(t.y_weights))
            simt::die("what a combine after it left looks like data");
    }
    if (!layouts[1].totals().epoch) simt::die("a combine made a handle useless");
}

// The same of a dispatch that exchanges its counts itself, to which rank 1 does not come, or with
// an id that no expert has.
inline void run_fused_given_up(bool is_absent, int tokens) {
    Case c = small_case(false);
    c.tokens = {tokens, tokens};
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes());
    const std::vector<Inputs> inputs = inputs_to_both(c);
    std::memset(inputs[1].ids.data(), 0x7f, c.index_bytes);
    const auto layouts = layouts_of(c, side);
    Grid grid(c, side, 50'000'000);
    const auto notify = notify_args(c, inputs, layouts, 0, side);
    std::vector<FusedDispatchArgs> args;
    const int ranks = is_absent ? 1 : 2;
    for (int rank = 0; rank < ranks; ++rank) {
        side.tensors.push_back(tensors_for(c, tokens));
        const Tensors& t = side.tensors.back();
        const Inputs& in = inputs[rank];
        args.push_back(
            fused_args({transfer_args(c, rank, layouts[rank], t, tokens * c.format.topk, 1),
                        in.x.data(), in.scales.data(), in.weights.data(), t.out.data(),
                        t.out_scales.data(), t.out_weights.data()},
                       notify[rank]));
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
        for (const Memory* memory : {&t.out, &t.out_scales, &t.out_weights}) {
            if (!is_poison(*memory)) simt::die("what came without counts looks like data");
        }
    }
    for (int rank = 0; rank < 2; ++rank) {
        const ControlBlock* block = side.heaps[rank].as<ControlBlock>();
        const uint64_t came = rank == 0;  // whose ids are wrong does not
        if (block->entered.notify != came || block->entered.transfer != came ||
            block->finished.notify || block->finished.transfer)
            simt::die("it cannot be seen who has not come to a dispatch with its counts");
    }
}

// What a handle of a call that failed may hold: a layout that was never made, or tables that are
// too small. Nothing is read or written through them, and the host is told why.
inline void run_unfit() {
    Case c = small_case(true);
    const auto expect = [](const Grid& grid, Outcome outcome, const char* what) {
        const ControlBlock& report = grid.report(0);
        if (ControlBlock::outcome_of(report.abort) != outcome ||
            report.incidents[0].outcome != outcome)
            simt::die(what);
    };
    const Tensors none{Memory(0), Memory(0), Memory(0), Memory(0),
                       Memory(0), Memory(0), Memory(0), Memory(0)};
    const Memory y(8 * c.format.payload_bytes), weights(8 * c.format.topk * c.format.weight_bytes);
    const auto args_of = [&](const std::vector<Layout>& layouts) {
        std::vector<CombineArgs> args;
        for (int rank = 0; rank < 2; ++rank) {
            args.push_back({transfer_args(c, rank, layouts[rank], none, 0, 1)});
            args.back().is_combine = true;
            args.back().y = y.data();  // rank 0's: all tokens are for its first expert
            args.back().y_weights = weights.data();
        }
        return args;
    };
    const auto make_side = [&] {
        Side side;
        for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
        return side;
    };
    {
        Side side = make_side();
        Grid grid(c, side);
        const auto layouts = layouts_of(c, side);
        std::vector<DispatchArgs> args;
        for (const CombineArgs& a : args_of(layouts))
            args.push_back({static_cast<const TransferArgs&>(a)});
        for (DispatchArgs& a : args) a.max_rows = 1 << 20;
        auto params = grid.params<Dispatch>(args, kBlockWarps);
        params.roles = grid.roles<DispatchRoles>();
        grid.run(kernels::dispatch_kernel<Dispatch>, params, 2);
        expect(grid, Outcome::NoLayout, "dispatch goes on without a layout");
    }
    for (const bool has_layout : {false, true}) {
        Side side = make_side();
        Grid grid(c, side);
        const auto layouts = layouts_of(c, side);
        if (has_layout) {
            for (int rank = 0; rank < 2; ++rank) {
                const Layout& layout = layouts[rank];
                std::memset(layout.data, 0, layout.size() * sizeof(int32_t));
                layout.totals().epoch = 1;
                for (int channel = 0; channel < c.heap.channels; ++channel)
                    layout.rail(channel, 1 - rank) = 1 << 20;
            }
        }
        const auto roles = grid.roles<CombineRoles>();
        auto params = grid.params<Combine>(args_of(layouts), roles.warps() * c.heap.channels);
        params.roles = roles;
        grid.run(kernels::combine_kernel<float, false, Combine>, params, 2);
        expect(grid, has_layout ? Outcome::Overflow : Outcome::NoLayout,
               "combine goes on with an unfit handle");
    }
}

}  // namespace ep
