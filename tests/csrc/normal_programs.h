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
#include "launch/host/roles.h"
#include "program_ranks.h"
#include "random_moves.h"
#include "summed_types.h"

namespace ep {

// Random programs of notify, dispatch and combine. All ranks make the same calls in the same order,
// and no rank waits for another but through the protocol: they may be calls apart. Dispatches and
// combines use any earlier handle, and rows of any type and size. Some handles need no notify:
// their rows go where all ranks have known beforehand.
//
// Numbers are small integers, so sums are exact in every type; or they are any, and what sums must
// be is not known here.
struct NormalProgram : ProgramRanks {
    enum class Kind { Notify, Dispatch, Combine };
    struct Row {
        int source = -1, token = 0, k = 0;  // -1: padding; a flat row is for all k
        bool operator==(const Row&) const = default;
    };
    // What one rank puts into a notify, gets of it, and must get.
    struct Share {
        Tensor<int32_t> ids, layout, dst_rows, rail, source_tokens;
        Tensor<int64_t> wide_ids, counts;
        std::vector<Row> rows;
        std::vector<bool> kept;  // of ids: whether the row has a place at its rank
        NotifyArgs notify{};
    };
    struct Handle {
        int topk;
        bool flat = false;
        int alignment = 1, capacity = 0;
        int room = 0;  // for so many quarters of a rank's rows, and for one; 0: for all
        std::vector<Share> shares{};
        bool dispatched = false;  // which fills the tables that combine reads
    };
    struct Call {
        Kind kind;
        int handle;
        DType dtype{};
        RowFormat format{};
        bool weighted = false, fills_tables = false;
        bool has_all_weights = false;  // of flat rows
        int biases = 0;
    };
    // One rank's part of a dispatch or combine.
    struct Part {
        Tensor<char> x, scales, weights, row_weights, bias;
        Tensor<char> out, out_scales, out_weights;                 // combine: y, y_weights
        Tensor<char> sums;                                         // combine, of an intra-rank pass
        Tensor<char> expected, expected_scales, expected_weights;  // of these
        DispatchArgs dispatch{};
        CombineArgs combine{};
        int receivers = 1;  // of combine, a channel
    };

    // OfWarps: short rows. OfBlocks: also such as the copy engine moves, of any numbers.
    enum class Sizes { OfWarps, OfBlocks };
    static constexpr int kMaxTopk = 6;

    Sizes sizes = Sizes::OfWarps;
    int max_hidden = 6, max_scales = 20, max_tokens = 40;
    DType dtype{};  // OfBlocks: of all calls
    Heap heap;
    int experts;
    std::vector<Call> calls;
    std::vector<Handle> handles;
    uint64_t notifies = 0;
    std::vector<std::vector<Part>> parts;  // [call][rank]
    SimulatedNetwork* network = nullptr;
    std::vector<uint64_t> arrived;                 // of each rank's warps, at the ends of launches
    std::vector<std::vector<size_t>> last_launch;  // [rank][call], launches up to its end

    // Without calls.
    explicit NormalProgram(const Heap& of) { set_up(of); }

    NormalProgram(uint64_t seed, SimulatedNetwork* between_nodes, Topology most = {3, 3},
                  Sizes of = Sizes::OfWarps)
        : sizes(of), network(between_nodes) {
        random.seed(seed);
        const Topology ranks{pick(1, most.nodes), pick(1, most.ranks_per_node)};
        size_t row = RowFormat(max_hidden * 8, max_scales, 8, kMaxTopk).slot_bytes();
        if (sizes == Sizes::OfBlocks) {
            dtype = summed_type(pick(0, 3));
            max_hidden = std::array{8, 33, 64, 1, 520, 3584, 4100}[pick(0, 6)];
            max_scales = pick(0, 2) ? 0 : pick(1, 1200);
            max_tokens = 14;
            row = RowFormat(max_hidden * size_of(dtype), max_scales, 8, kMaxTopk).slot_bytes();
        }
        const int channels = pick(1, 3);
        set_up({ranks, ranks.world() * pick(1, 4), channels,
                align_up(row * pick(1, 4), Heap::kLine), align_up(row * pick(1, 4), Heap::kLine)});
        for (int count = pick(2, 8); count > 0; --count) add_call();
    }

    void set_up(const Heap& of) {
        heap = of;
        topology = heap.topology;
        experts = heap.num_experts;
        make_ranks(heap.bytes(), [&](int rank) {
            return reinterpret_cast<ControlBlock*>(heaps[rank] + heap.control());
        });
        arrived.assign(topology.world(), 0);
    }

    void add_call() {
        using enum Kind;  // the first dispatch of a handle comes of itself
        constexpr std::array kKinds = {Notify, Notify, Dispatch, Combine, Combine, Combine};
        const Kind kind = handles.empty() ? Notify : kKinds[pick(0, 5)];
        Call call{kind, pick(0, std::max<int>(0, handles.size() - 1))};
        if (kind == Kind::Notify && pick(0, 2)) return add_handle();
        if (kind == Kind::Notify) {
            add_planned_handle();
            call = {Kind::Dispatch, static_cast<int>(handles.size()) - 1};
        }
        const Handle& handle = handles[call.handle];
        if (!handle.dispatched) call.kind = Kind::Dispatch;
        const bool is_combine = call.kind == Kind::Combine;
        const bool is_any = sizes == Sizes::OfWarps;
        call.dtype = is_any ? summed_type(pick(0, 3)) : dtype;
        const int hidden = is_any || pick(0, 3) == 0 ? pick(1, max_hidden) : max_hidden;
        const int scales = !is_combine && max_scales && pick(0, 2) == 0 ? pick(1, max_scales) : 0;
        call.format = {hidden * size_of(call.dtype), scales, 4 * pick(0, 2), handle.topk,
                       static_cast<int>(call.dtype)};
        call.weighted = is_combine && pick(0, 1);
        call.has_all_weights = handle.flat && pick(0, 1);
        call.biases = is_combine ? pick(0, 2) : 0;
        add(call);
    }

    // A dispatch or combine.
    void add(Call call) {
        const bool is_combine = call.kind == Kind::Combine;
        call.fills_tables = !std::exchange(handles[call.handle].dispatched, true);
        calls.push_back(call);
        parts.emplace_back(topology.world());
        for (int rank = 0; rank < topology.world(); ++rank)
            is_combine ? make_combine(rank) : make_dispatch(rank);
    }

    void add_planned_handle() {
        const int topk = pick(1, kMaxTopk);
        const RandomMoves plan(random, topology, most_tokens(), topk);
        const auto epoch = static_cast<uint32_t>(1000 + handles.size());
        handles.push_back({topk});
        for (int rank = 0; rank < topology.world(); ++rank) {
            Share& share = handles.back().shares.emplace_back();
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
        }
        make_shares(handles.back());
        for (int rank = 0; rank < topology.world(); ++rank) {
            Layout& layout = handles.back().shares[rank].notify.layout;
            layout.is_planned = true;
            plan.lay_out(layout, rank, epoch);
        }
    }

    int most_tokens() {
        return sizes == Sizes::OfBlocks ? max_tokens : std::array{0, 3, 12, max_tokens}[pick(0, 3)];
    }

    void add_handle() {
        const int topk = pick(1, std::min(kMaxTopk, experts));
        Handle handle{topk, pick(0, 2) == 0, pick(0, 2) ? 1 : 4};
        if (!handle.flat && pick(0, 3) == 0) {
            handle.alignment = 1;
            handle.capacity = pick(1, 9);
        }
        if (pick(0, 3) == 0) handle.room = pick(1, 4);
        const bool is_wide = pick(0, 1);
        const int most = most_tokens();
        std::vector<std::vector<int32_t>> ids(topology.world());
        for (std::vector<int32_t>& own : ids) {
            std::vector<int> order(experts);
            std::iota(order.begin(), order.end(), 0);
            const int tokens = pick(0, most), spread = pick(1, experts);
            const bool is_anywhere = pick(0, 1);  // else to experts beside each other
            for (int token = 0; token < tokens; ++token) {
                if (is_anywhere) std::ranges::shuffle(order, random);
                const int first = pick(0, spread - 1);
                const int step = handle.flat && pick(0, 3) == 0 ? 0 : 1;  // may name one twice
                for (int k = 0; k < topk; ++k)
                    own.push_back(pick(0, 5) ? order[(first + step * k) % experts] : -1);
            }
        }
        add_handle(std::move(handle), ids, is_wide);
    }

    // ids: of each rank. is_wide: they are given as numbers of 64 bits.
    void add_handle(Handle handle, const std::vector<std::vector<int32_t>>& ids,
                    bool is_wide = false) {
        calls.push_back({Kind::Notify, static_cast<int>(handles.size())});
        parts.emplace_back(topology.world());
        const int world = topology.world(), topk = handle.topk;
        for (const std::vector<int32_t>& own : ids)
            handle.shares.emplace_back().ids.assign(own.begin(), own.end());
        for (int rank = 0; rank < world; ++rank) {
            std::vector<Row>& rows = handle.shares[rank].rows;
            std::vector<Row> arriving;  // tokens, each once
            for (int source = 0; source < world; ++source) {
                for (int i = 0; i < static_cast<int>(ids[source].size()); ++i) {
                    const Row row{source, i / topk};
                    const bool is_new = arriving.empty() || arriving.back() != row;
                    if (rank_of(handle, {source, i / topk, i % topk}) == rank && is_new)
                        arriving.push_back(row);
                }
            }
            if (handle.flat) rows = arriving;
            for (int local = 0; !handle.flat && local < heap.local_experts(); ++local) {
                const size_t before = rows.size();
                for (int source = 0; source < world; ++source) {
                    for (int i = 0; i < static_cast<int>(ids[source].size()); ++i) {
                        if (ids[source][i] == rank * heap.local_experts() + local)
                            rows.push_back({source, i / topk, i % topk});
                    }
                }
                const size_t own = rows.size() - before;
                rows.resize(before +
                            (handle.capacity ? handle.capacity : align_up(own, handle.alignment)));
            }
            if (!handle.room) continue;
            rows.resize(rows.size() * handle.room / 4 + 1);
            for (size_t i = rows.size(); i < arriving.size(); ++i)  // for which tables have no room
                std::ranges::replace_if(
                    rows, [&](Row row) { return row.k = 0, row == arriving[i]; }, Row{});
        }
        const uint64_t epoch = ++notifies;
        make_shares(handle);
        for (int rank = 0; rank < world; ++rank) {
            Share& share = handle.shares[rank];
            share.counts.resize(2 * heap.local_experts());
            if (is_wide) share.wide_ids.assign(share.ids.begin(), share.ids.end());
            const void* given = is_wide ? static_cast<void*>(share.wide_ids.data())
                                        : static_cast<void*>(share.ids.data());
            share.notify = {{given, is_wide ? 8 : 4, handle.alignment, handle.capacity,
                             share.counts.data(), handle.flat},
                            rank,
                            heap,
                            share.notify.layout,
                            epoch};
        }
        handles.push_back(std::move(handle));
    }

    // What all have whose ids and rows are known.
    void make_shares(Handle& handle) {
        // tables of as many rows as there can be, so that nobody has to be asked before the next
        // call
        size_t sent = 0;
        for (Share& share : handle.shares) {
            sent += share.ids.size();
            share.kept.resize(share.ids.size());
        }
        for (int rank = 0; rank < topology.world(); ++rank) {
            Share& share = handle.shares[rank];
            share.dst_rows.resize(std::max(sent, share.rows.size() * handle.topk));
            share.rail.resize(share.dst_rows.size());
            share.source_tokens.resize(share.dst_rows.size() / handle.topk);
            Layout layout{topology,      static_cast<int>(share.ids.size()) / handle.topk,
                          handle.topk,   experts,
                          heap.channels, nullptr};
            share.layout.resize(layout.size());
            layout.data = share.layout.data();
            share.notify.layout = layout;
            for (const Row& row : share.rows) {
                for (int k = 0; row.source >= 0 && k < handle.topk; ++k) {
                    if (handle.flat ? rank_of(handle, {row.source, row.token, k}) == rank
                                    : k == row.k)
                        handle.shares[row.source].kept[row.token * handle.topk + k] = true;
                }
            }
        }
    }

    static void append(Tensor<char>& bytes, DType dtype, double value) {
        as_stored(dtype, value, [&](auto number) {
            const auto raw = std::bit_cast<std::array<char, sizeof(number)>>(number);
            bytes.insert(bytes.end(), raw.begin(), raw.end());
        });
    }
    // What the elements, and the bytes beside a row, are: different for most rows and calls.
    double number(const Row& row, int i) const {
        const int small = static_cast<int>(calls.size() * 3 + row.source * 7 + row.token * 5 + i);
        if (sizes == Sizes::OfWarps) return small % 19 - 9;
        return static_cast<int>((word(row) >> 20) + i * 7919) % 20001 / 512.;
    }
    uint64_t word(const Row& row) const {
        return (calls.size() << 48 | static_cast<uint64_t>(row.source) << 32 |
                static_cast<uint64_t>(row.token) << 8 | row.k) *
               0x9e3779b97f4a7c15;
    }
    void append_elements(Tensor<char>& bytes, const Row& row) const {
        const Call& call = calls.back();
        for (int i = 0; i < call.format.payload_bytes / size_of(call.dtype); ++i)
            append(bytes, call.dtype, row.source < 0 ? 99 : number(row, i));
    }
    void append_beside(Tensor<char>& bytes, const Row& row, int count) const {
        for (int i = 0; i < count; ++i)
            bytes.push_back(static_cast<char>(word(row) >> 8 * (i % 8)));
    }
    // Others than 1 to 3 have all the bits that they can have, so that products are rounded.
    double row_weight(int expert) const {
        return sizes == Sizes::OfWarps ? 1 + expert % 3 : (20 + expert % 7) / 3.;
    }
    // Where a token's k-th expert lives; -1: it has none.
    int rank_of(const Handle& handle, const Row& choice) const {
        const int id = handle.shares[choice.source].ids[choice.token * handle.topk + choice.k];
        return id < 0 ? -1 : id / heap.local_experts();
    }

    TransferArgs transfer_args(int rank) {
        Handle& handle = handles[calls.back().handle];
        Share& share = handle.shares[rank];
        const auto tables = static_cast<int64_t>(share.dst_rows.size()) / handle.topk;
        const auto rows = static_cast<int64_t>(share.rows.size());
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
                             handle.room ? rows : tables,
                             tables,
                             rows};
        args.is_flat = handle.flat;
        args.fills_tables = calls.back().fills_tables;
        return args;
    }

    void make_dispatch(int rank) {
        const Call& call = calls.back();
        const RowFormat& format = call.format;
        Part& part = parts.back()[rank];
        Handle& handle = handles[call.handle];
        Share& share = handle.shares[rank];
        const int tokens = static_cast<int>(share.ids.size()) / format.topk;
        for (int token = 0; token < tokens; ++token) {
            append_elements(part.x, {rank, token, 0});
            append_beside(part.scales, {rank, token, 0}, format.scale_bytes);
            for (int k = 0; k < format.topk; ++k)
                append_beside(part.weights, {rank, token, k}, format.weight_bytes);
        }
        for (const Row& row : share.rows) {
            const bool is_there = row.source >= 0;
            const size_t before = part.expected.size(), before_scales = part.expected_scales.size();
            if (is_there) {
                append_elements(part.expected, {row.source, row.token, 0});
                append_beside(part.expected_scales, {row.source, row.token, 0}, format.scale_bytes);
            }
            part.expected.resize(before + format.payload_bytes);
            part.expected_scales.resize(before_scales + format.scale_bytes);
            for (int k = handle.flat ? 0 : row.k; k < (handle.flat ? format.topk : row.k + 1);
                 ++k) {
                const Row choice{row.source, row.token, k};
                const size_t before_k = part.expected_weights.size();
                if (is_there && (call.has_all_weights || rank_of(handle, choice) == rank))
                    append_beside(part.expected_weights, choice, format.weight_bytes);
                part.expected_weights.resize(before_k + format.weight_bytes);
            }
        }
        clear_outputs(part);
        part.dispatch = {transfer_args(rank),     part.x.data(),
                         part.scales.data(),      part.weights.data(),
                         part.out.data(),         part.out_scales.data(),
                         part.out_weights.data(), pick(0, 1) == 0 && !handle.flat};
        part.dispatch.has_all_weights = call.has_all_weights;
        part.dispatch.source_tokens = share.source_tokens.data();
    }

    void make_combine(int rank) {
        const Call& call = calls.back();
        const RowFormat& format = call.format;
        Handle& handle = handles[call.handle];
        Share& share = handle.shares[rank];
        Part& part = parts.back()[rank];
        for (const Row& row : share.rows) {
            append_elements(part.x, row);
            for (int k = handle.flat ? 0 : row.k; k < (handle.flat ? format.topk : row.k + 1); ++k)
                append_beside(part.weights, {row.source, row.token, k}, format.weight_bytes);
            const int id =
                row.source < 0 ? 0 : handle.shares[row.source].ids[row.token * format.topk + row.k];
            append(part.row_weights, call.dtype == DType::fp64 ? DType::fp64 : DType::fp32,
                   row_weight(handle.flat ? rank : id));
        }
        for (int token = 0; token < static_cast<int>(share.ids.size()) / format.topk; ++token) {
            double times = 0;
            uint32_t ranks = 0;  // that had the token
            for (int k = 0; k < format.topk; ++k) {
                const int id = share.ids[token * format.topk + k];
                const bool is_kept = share.kept[token * format.topk + k];
                const int owner = rank_of(handle, {rank, token, k});
                if (is_kept && !(handle.flat && ranks >> owner & 1))
                    times += call.weighted ? row_weight(handle.flat ? owner : id) : 1;
                if (is_kept) ranks |= uint32_t{1} << owner;
                const size_t before = part.expected_weights.size();
                if (is_kept)
                    append_beside(part.expected_weights, {rank, token, k}, format.weight_bytes);
                part.expected_weights.resize(before + format.weight_bytes);
            }
            if (call.biases) append_elements(part.bias, {rank, token, kMaxTopk});
            for (int i = 0; i < format.payload_bytes / size_of(call.dtype); ++i)
                append(part.expected, call.dtype,
                       (times + call.biases) * number({rank, token, 0}, i) + 0.);  // no -0
        }
        clear_outputs(part);
        const size_t known = share.dst_rows.size() / handle.topk;
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
        for (int i = 0; i < call.biases; ++i) part.combine.bias[i] = part.bias.data();
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

    void reset() {
        ProgramRanks::reset();
        arrived.assign(arrived.size(), 0);
        for (std::vector<Part>& ranks : parts) {
            for (Part& part : ranks) clear_outputs(part);
        }
    }
};

}  // namespace ep
