#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "exec/host/host_warp.h"
#include "fabric/host_fabric.h"
#include "fabric/shared_memory.h"
#include "launch/host/roles.h"
#include "random_moves.h"
#include "summed_types.h"

namespace ep {

// Random programs of notify, dispatch and combine. All ranks make the same calls in the same order,
// and no rank waits for another but through the protocol: they may be calls apart. Dispatches and
// combines use any earlier handle, and rows of any type and size. Some handles need no notify:
// their rows go where all ranks have known beforehand.
//
// Numbers are small integers, so sums are exact in every type.
struct NormalProgram {
    enum class Kind { Notify, Dispatch, Combine };
    struct Row {
        int source = -1, token = 0, k = 0;  // -1: padding; a flat row is for all k
    };
    // What one rank puts into a notify, gets of it, and must get.
    struct Share {
        std::vector<int32_t> ids, layout, dst_rows, rail;
        std::vector<int64_t> counts;
        std::vector<Row> rows;
        NotifyArgs notify{};
    };
    struct Handle {
        int topk, alignment;
        bool flat;
        std::vector<Share> shares;
        bool dispatched = false;  // which fills the tables that combine reads
    };
    struct Call {
        Kind kind;
        int handle;
        DType dtype{};
        RowFormat format{};
        bool weighted = false, fills_tables = false;
    };
    // One rank's part of a dispatch or combine.
    struct Part {
        std::vector<char> x, scales, weights, row_weights;
        std::vector<char> out, out_scales, out_weights;  // combine: y, y_weights
        std::vector<char> sums;                          // combine, of an intra-rank pass
        std::vector<char> expected, expected_scales, expected_weights;  // of these
        DispatchArgs dispatch{};
        CombineArgs combine{};
        int receivers = 1;  // of combine, a channel
    };

    static constexpr int kMaxTopk = 4, kMaxHidden = 6, kMaxScales = 20;

    std::mt19937_64 random;
    Topology topology;
    Heap heap;
    int experts;
    std::vector<Call> calls;
    std::vector<Handle> handles;
    uint64_t notifies = 0;
    std::vector<std::vector<Part>> parts;  // [call][rank]
    std::vector<Segment> memory;
    std::vector<RankState> states;
    SimulatedNetwork* network;
    std::vector<char*> heaps;
    std::vector<uint64_t> arrived;                 // of each rank's warps, at the ends of launches
    std::vector<std::vector<size_t>> last_launch;  // [rank][call], launches up to its end

    int pick(int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); }

    NormalProgram(uint64_t seed, SimulatedNetwork* between_nodes, Topology most = {3, 3})
        : random(seed), network(between_nodes) {
        topology = {pick(1, most.nodes), pick(1, most.ranks_per_node)};
        const int world = topology.world();
        experts = world * pick(1, 3);
        const size_t largest = RowFormat(kMaxHidden * 8, kMaxScales, 8, kMaxTopk).slot_bytes();
        heap = {topology, experts, pick(1, 3), align_up(largest * pick(1, 4), Heap::kLine),
                align_up(largest * pick(1, 4), Heap::kLine)};
        std::vector<ControlBlock*> controls;
        for (int rank = 0; rank < world; ++rank) {
            memory.push_back(Segment::anonymous(heap.bytes()));
            heaps.push_back(memory.back().data());
            controls.push_back(reinterpret_cast<ControlBlock*>(heaps.back() + heap.control()));
        }
        for (int rank = 0; rank < world; ++rank)
            states.push_back({rank, controls[rank], controls, std::chrono::seconds(60)});
        arrived.assign(world, 0);
        const int count = pick(2, 8);
        for (int call = 0; call < count; ++call) add_call();
    }

    void add_call() {
        Kind kind = handles.empty() ? Kind::Notify : static_cast<Kind>(pick(0, 5) / 2);
        Call call{kind, pick(0, std::max<int>(0, handles.size() - 1))};
        if (kind != Kind::Notify && !std::exchange(handles[call.handle].dispatched, true)) {
            call.kind = kind = Kind::Dispatch;
            call.fills_tables = true;
        }
        parts.emplace_back(topology.world());
        if (kind == Kind::Notify && pick(0, 2) == 0) {
            add_planned_handle();
            call = {call.kind = kind = Kind::Dispatch, static_cast<int>(handles.size()) - 1};
            handles.back().dispatched = call.fills_tables = true;
        }
        if (kind == Kind::Notify) {
            call.handle = handles.size();
            calls.push_back(call);
            return add_handle();
        }
        call.dtype = summed_type(pick(0, 3));
        const int topk = handles[call.handle].topk;
        const int scales = kind == Kind::Dispatch && pick(0, 2) == 0 ? pick(1, kMaxScales) : 0;
        call.format = {pick(1, kMaxHidden) * size_of(call.dtype), scales, 4 * pick(0, 2), topk,
                       static_cast<int>(call.dtype)};
        call.weighted = kind == Kind::Combine && pick(0, 1);
        calls.push_back(call);
        for (int rank = 0; rank < topology.world(); ++rank)
            kind == Kind::Dispatch ? make_dispatch(rank) : make_combine(rank);
    }

    void add_planned_handle() {
        const int world = topology.world(), topk = pick(1, kMaxTopk);
        const RandomMoves plan(random, topology, std::array{0, 3, 12, 40}[pick(0, 3)], topk);
        const auto epoch = static_cast<uint32_t>(1000 + handles.size());
        handles.push_back({topk, 1, false, std::vector<Share>(world)});
        for (int rank = 0; rank < world; ++rank) {
            Share& share = handles.back().shares[rank];
            share.ids.assign(static_cast<size_t>(plan.tokens[rank]) * topk, -1);
            share.rows.resize(plan.rows[rank]);
            for (const Move& move : plan.moves) {
                for (int i = 0; i < move.rows; ++i) {
                    const int token = move.token + i;
                    if (move.source == rank)
                        share.ids[token * topk + move.k] = move.rank * heap.local_experts();
                    if (move.rank == rank)
                        share.rows[move.place + i] = {move.source, token, move.k};
                }
            }
            const size_t all = std::accumulate(plan.tokens.begin(), plan.tokens.end(), 0);
            share.dst_rows.resize(all * topk);
            share.rail.resize(all * topk);
            Layout layout{topology, plan.tokens[rank], topk, experts, heap.channels, nullptr};
            share.layout.resize(layout.size());
            layout.data = share.layout.data();
            layout.is_planned = true;
            plan.lay_out(layout, rank, epoch);
            share.notify.layout = layout;
        }
    }

    void add_handle() {
        const int world = topology.world(), topk = pick(1, std::min(kMaxTopk, experts));
        const uint64_t epoch = ++notifies;
        handles.push_back({topk, pick(0, 2) ? 1 : 4, pick(0, 2) == 0, std::vector<Share>(world)});
        Handle& handle = handles.back();
        const int most = std::array{0, 3, 12, 40}[pick(0, 3)];
        for (Share& share : handle.shares) {
            const int tokens = pick(0, most), spread = pick(1, experts);
            for (int token = 0; token < tokens; ++token) {
                const int first = pick(0, spread - 1);
                for (int k = 0; k < topk; ++k)
                    share.ids.push_back(pick(0, 5) ? (first + k) % experts : -1);
            }
        }
        for (int rank = 0; rank < world; ++rank) {
            Share& share = handle.shares[rank];
            for (int source = 0; handle.flat && source < world; ++source) {
                const int tokens = static_cast<int>(handle.shares[source].ids.size()) / topk;
                for (int token = 0; token < tokens; ++token) {
                    bool wants = false;
                    for (int k = 0; k < topk; ++k)
                        wants |= rank_of(handle, {source, token, k}) == rank;
                    if (wants) share.rows.push_back({source, token});
                }
            }
            for (int local = 0; !handle.flat && local < heap.local_experts(); ++local) {
                const size_t before = share.rows.size();
                for (int source = 0; source < world; ++source) {
                    const std::vector<int32_t>& ids = handle.shares[source].ids;
                    for (int i = 0; i < static_cast<int>(ids.size()); ++i) {
                        if (ids[i] == rank * heap.local_experts() + local)
                            share.rows.push_back({source, i / topk, i % topk});
                    }
                }
                share.rows.resize(before + align_up(share.rows.size() - before, handle.alignment));
            }
            share.counts.resize(2 * heap.local_experts());
            // as many as there can be, so that nobody has to be asked before the next call
            size_t sent = 0;
            for (const Share& source : handle.shares) sent += source.ids.size();
            share.dst_rows.resize(sent);
            share.rail.resize(sent);
            Layout layout{topology,      static_cast<int>(share.ids.size()) / topk,
                          topk,          experts,
                          heap.channels, nullptr};
            share.layout.resize(layout.size());
            layout.data = share.layout.data();
            share.notify = {{share.ids.data(), 4, handle.alignment, 0, share.counts.data()},
                            rank,
                            heap,
                            layout,
                            epoch};
        }
    }

    static void append(std::vector<char>& bytes, DType dtype, double value) {
        as_stored(dtype, value, [&](auto number) {
            const auto raw = std::bit_cast<std::array<char, sizeof(number)>>(number);
            bytes.insert(bytes.end(), raw.begin(), raw.end());
        });
    }
    // What the elements, and the bytes beside a row, are: different for most rows and calls.
    int number(const Row& row, int i) const {
        return static_cast<int>(calls.size() * 3 + row.source * 7 + row.token * 5 + i) % 19 - 9;
    }
    void append_beside(std::vector<char>& bytes, const Row& row, int count) const {
        const uint64_t word = (calls.size() << 48 | static_cast<uint64_t>(row.source) << 32 |
                               static_cast<uint64_t>(row.token) << 8 | row.k) *
                              0x9e3779b97f4a7c15;
        for (int i = 0; i < count; ++i) bytes.push_back(static_cast<char>(word >> 8 * (i % 8)));
    }
    static int row_weight(int expert) { return 1 + expert % 3; }
    // Where a token's k-th expert lives; -1: it has none.
    int rank_of(const Handle& handle, const Row& choice) const {
        const int id = handle.shares[choice.source].ids[choice.token * handle.topk + choice.k];
        return id < 0 ? -1 : id / heap.local_experts();
    }

    TransferArgs transfer_args(int rank) {
        Handle& handle = handles[calls.back().handle];
        Share& share = handle.shares[rank];
        const auto tables = static_cast<int64_t>(share.dst_rows.size()) / handle.topk;
        uint64_t number = 0;
        for (const Call& call : calls) number += call.kind != Kind::Notify;
        TransferArgs args = {rank,
                             heap,
                             share.notify.layout,
                             calls.back().format,
                             number,
                             1 + static_cast<int>(calls.size() % 5),
                             1 + static_cast<int>(calls.size() % 3),
                             share.dst_rows.data(),
                             share.rail.data(),
                             tables,
                             tables,
                             static_cast<int64_t>(share.rows.size())};
        args.is_flat = handle.flat;
        args.fills_tables = calls.back().fills_tables;
        return args;
    }

    void make_dispatch(int rank) {
        const Call& call = calls.back();
        const RowFormat& format = call.format;
        Part& part = parts.back()[rank];
        const Handle& handle = handles[call.handle];
        const Share& share = handle.shares[rank];
        auto append_elements = [&](std::vector<char>& bytes, const Row& row) {
            for (int i = 0; i < format.payload_bytes / size_of(call.dtype); ++i)
                append(bytes, call.dtype, number(row, i));
        };
        const int tokens = static_cast<int>(share.ids.size()) / format.topk;
        for (int token = 0; token < tokens; ++token) {
            append_elements(part.x, {rank, token, 0});
            append_beside(part.scales, {rank, token, 0}, format.scale_bytes);
            for (int k = 0; k < format.topk; ++k)
                append_beside(part.weights, {rank, token, k}, format.weight_bytes);
        }
        for (const Row& row : share.rows) {
            const size_t before = part.expected.size(), before_scales = part.expected_scales.size(),
                         before_weights = part.expected_weights.size();
            if (row.source >= 0) {
                append_elements(part.expected, row);
                append_beside(part.expected_scales, {row.source, row.token, 0}, format.scale_bytes);
                if (!handle.flat) append_beside(part.expected_weights, row, format.weight_bytes);
            }
            for (int k = 0; handle.flat && k < format.topk; ++k) {
                const Row choice{row.source, row.token, k};
                const size_t before_k = part.expected_weights.size();
                if (rank_of(handle, choice) == rank)
                    append_beside(part.expected_weights, choice, format.weight_bytes);
                part.expected_weights.resize(before_k + format.weight_bytes);
            }
            part.expected.resize(before + format.payload_bytes);
            part.expected_scales.resize(before_scales + format.scale_bytes);
            if (!handle.flat) part.expected_weights.resize(before_weights + format.weight_bytes);
        }
        clear_outputs(part);
        part.dispatch = {transfer_args(rank),     part.x.data(),
                         part.scales.data(),      part.weights.data(),
                         part.out.data(),         part.out_scales.data(),
                         part.out_weights.data(), pick(0, 1) == 0 && !handle.flat};
    }

    void make_combine(int rank) {
        const Call& call = calls.back();
        const RowFormat& format = call.format;
        Handle& handle = handles[call.handle];
        Part& part = parts.back()[rank];
        const int elements = format.payload_bytes / size_of(call.dtype);
        for (const Row& row : handle.shares[rank].rows) {
            const bool padding = row.source < 0;
            for (int i = 0; i < elements; ++i)
                append(part.x, call.dtype, padding ? 99 : number(row, i));
            for (int k = handle.flat ? 0 : row.k; k < (handle.flat ? format.topk : row.k + 1); ++k)
                append_beside(part.weights, {row.source, row.token, k}, format.weight_bytes);
            const int id =
                padding ? 0 : handle.shares[row.source].ids[row.token * format.topk + row.k];
            append(part.row_weights, call.dtype == DType::fp64 ? DType::fp64 : DType::fp32,
                   row_weight(handle.flat ? rank : id));
        }
        const std::vector<int32_t>& ids = handle.shares[rank].ids;
        for (int token = 0; token < static_cast<int>(ids.size()) / format.topk; ++token) {
            int times = 0;
            uint32_t ranks = 0;  // that had the token
            for (int k = 0; k < format.topk; ++k) {
                const int id = ids[token * format.topk + k];
                const int owner = rank_of(handle, {rank, token, k});
                if (id >= 0 && !(handle.flat && ranks >> owner & 1))
                    times += call.weighted ? row_weight(handle.flat ? owner : id) : 1;
                if (id >= 0) ranks |= uint32_t{1} << owner;
                const size_t before = part.expected_weights.size();
                if (id >= 0)
                    append_beside(part.expected_weights, {rank, token, k}, format.weight_bytes);
                part.expected_weights.resize(before + format.weight_bytes);
            }
            for (int i = 0; i < elements; ++i)
                append(part.expected, call.dtype, times * number({rank, token, 0}, i));
        }
        clear_outputs(part);
        const size_t known = handle.shares[rank].dst_rows.size() / handle.topk;
        part.sums.resize(pick(0, 1) * !handle.flat * known * format.payload_bytes);
        TransferArgs args = transfer_args(rank);
        args.is_combine = true;
        part.combine = {args,
                        part.x.data(),
                        part.weights.data(),
                        part.out.data(),
                        part.out_weights.data(),
                        call.weighted ? part.row_weights.data() : nullptr,
                        part.sums.empty() ? nullptr : part.sums.data(),
                        pick(1, CombineArgs::kMaxSumWarps)};
        part.receivers = pick(1, std::min(static_cast<int>(args.nvl_slots()), 6));
    }

    static void clear_outputs(Part& part) {
        part.out.assign(part.expected.size(), 0x77);
        part.out_scales.assign(part.expected_scales.size(), 0x77);
        part.out_weights.assign(part.expected_weights.size(), 0x77);
    }

    // The roles of all ranks. Each warp goes through the launches of its rank, in each of which it
    // has one role or none, and waits after each for the others: a launch follows the one before.
    template <class Warp, class Fabric>
    std::vector<RoleTask> tasks() {
        return tasks<Warp>([&](int rank) { return Fabric(topology, rank, heaps, network); });
    }
    template <class Warp, class FabricOf>
    std::vector<RoleTask> tasks(FabricOf&& fabric_of) {
        std::vector<RoleTask> all;
        last_launch.assign(topology.world(), {});
        for (int rank = 0; rank < topology.world(); ++rank) {
            std::vector<std::vector<RoleTask>> launches;
            size_t warps = 0;
            for (size_t call = 0; call < calls.size(); ++call) {
                for (auto& roles : launches_of<Warp>(rank, call, fabric_of)) {
                    warps = std::max(warps, roles.size());
                    if (!roles.empty()) launches.push_back(std::move(roles));
                }
                last_launch[rank].push_back(launches.size());
            }
            for (size_t number = 0; number < warps; ++number) {
                std::vector<RoleTask> own;
                for (const std::vector<RoleTask>& roles : launches)
                    own.push_back(number < roles.size() ? roles[number] : RoleTask{});
                all.push_back({&states[rank], [=, this](Executor& executor) {
                                   run_warp(executor, rank, own, warps);
                               }});
            }
        }
        return all;
    }

    // The roles of a call, and what comes behind them.
    template <class Warp, class FabricOf>
    std::array<std::vector<RoleTask>, 2> launches_of(int rank, size_t number,
                                                     FabricOf&& fabric_of) {
        std::array<std::vector<RoleTask>, 2> launches;
        const RankState* state = &states[rank];
        const auto fabric = std::make_shared<std::invoke_result_t<FabricOf, int>>(fabric_of(rank));
        auto adder = [&](std::vector<RoleTask>& roles) {
            return [=, &roles](int channel, auto body) {
                roles.push_back(
                    {nullptr, [=](Executor& executor) {
                         body([&](Role role) { return Warp(executor, *state, role, channel); },
                              *fabric);
                     }});
            };
        };
        auto& [roles, behind] = launches;
        const Call& call = calls[number];
        const Part& part = parts[number][rank];
        switch (call.kind) {
            case Kind::Notify:
                add_count_roles(handles[call.handle].shares[rank].notify, adder(roles));
                add_exchange_roles(handles[call.handle].shares[rank].notify, adder(behind));
                break;
            case Kind::Dispatch:
                add_dispatch_roles(part.dispatch, adder(roles));
                add_intra_rank_pass(part.dispatch, adder(behind));
                break;
            case Kind::Combine:
                with_summed_type(call.dtype, [&]<class T>() {
                    add_combine_roles<T>(part.combine, part.receivers, adder(roles));
                });
        }
        return launches;
    }

    void run_warp(Executor& executor, int rank, const std::vector<RoleTask>& own, size_t warps) {
        const RankState& state = states[rank];
        std::atomic_ref<uint64_t> arrivals(arrived[rank]);
        for (size_t launch = 0; launch < own.size(); ++launch) {
            if (own[launch].run) own[launch].run(executor);
            if (std::atomic_ref<uint64_t>(state.unfinished).load()) return;
            arrivals.fetch_add(1);
            auto all_arrived = [&] { return arrivals.load() >= (launch + 1) * warps; };
            if (all_arrived()) continue;
            const WaitEnd end = executor.wait(Condition(all_arrived), state);
            if (end == WaitEnd::Expired) state.abort(Outcome::Timeout);
            if (end != WaitEnd::Met) return;
        }
    }

    bool aborted() const {
        for (const RankState& state : states) {
            if (state.aborted()) return true;
        }
        return false;
    }

    // Wrong outputs, of calls that a rank finished. warps_of[rank]: as many as it has tasks.
    int errors(const std::vector<size_t>& warps_of) const {
        int wrong = 0;
        for (int rank = 0; rank < topology.world(); ++rank) {
            const size_t finished = arrived[rank] / warps_of[rank];
            if (finished < last_launch[rank].back() && !aborted()) ++wrong;
            for (size_t call = 0; call < calls.size(); ++call) {
                if (finished < last_launch[rank][call]) break;
                const Part& part = parts[call][rank];
                wrong += part.out != part.expected || part.out_scales != part.expected_scales ||
                         part.out_weights != part.expected_weights;
            }
        }
        return wrong;
    }
    int errors(const std::vector<RoleTask>& tasks) const {
        std::vector<size_t> warps(topology.world());
        for (const RoleTask& task : tasks) ++warps[task.rank->rank];
        return errors(warps);
    }

    // As before the first call: what reset does, when nothing runs any more.
    void reset() {
        for (const Segment& segment : memory) std::memset(segment.data(), 0, heap.bytes());
        for (RankState& state : states) {
            state.unfinished = 0;
            state.stalled = false;
        }
        arrived.assign(arrived.size(), 0);
        for (std::vector<Part>& ranks : parts) {
            for (Part& part : ranks) clear_outputs(part);
        }
    }
};

}  // namespace ep
