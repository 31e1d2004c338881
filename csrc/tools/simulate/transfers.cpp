#include "tools/simulate/transfers.h"

#include <algorithm>
#include <stdexcept>

#include "launch/cuda/channels.h"
#include "launch/run_role.h"
#include "protocol/intra_rank.h"
#include "protocol/layout.h"
#include "protocol/notify.h"
#include "tools/simulate/virtual_fabric.h"

namespace ep {
namespace {

// Bytes of a simulated row, which takes the time of a real one: no role depends on the size.
constexpr int kPayloadBytes = 16, kScaleBytes = 4;

// Tensors of one rank's calls.
struct Share {
    std::vector<int32_t> layout, dst_rows, rail_experts;
    std::vector<int64_t> counts;
    std::vector<char> x, rows, sums, y, scales, row_scales;
    std::vector<float> weights, row_weights, y_weights;
    uint64_t meetings = 0;  // arrivals of notify's warps
};

}  // namespace

struct VirtualTransfers::State {
    VirtualSettings settings;
    Topology topology;
    int ranks;  // simulated ranks
    NodeImages images;
    Segment memory;
    VirtualCluster cluster;
    VirtualCards cards;
    std::vector<Share> shares;
    std::vector<NotifyArgs> notify;
    std::vector<DispatchArgs> dispatch;
    std::vector<CombineArgs> combine;
    uint64_t calls = 0;

    static RowFormat format_of(const VirtualSettings& s) {
        return {kPayloadBytes, s.scale_bytes > 0 ? kScaleBytes : 0, s.weight_bytes, s.topk};
    }
    // Slots are larger than dispatch's in the same ratio as real ones, so that a ring holds fewer.
    static RowFormat combine_format_of(const VirtualSettings& s) {
        const RowFormat dispatch = format_of(s);
        const size_t slot = dispatch.slot_bytes() * s.slot_ratio;
        return {static_cast<int>(slot - dispatch.payload()), 0, s.weight_bytes, s.topk};
    }
    static Heap heap_of(const VirtualSettings& s) {
        const size_t slot = format_of(s).slot_bytes();
        return {s.topology, s.num_experts, s.channels, s.nvl_rows * slot, s.rdma_rows * slot};
    }

    State(const Machine& machine, const VirtualSettings& s)
        : settings(s),
          topology(s.topology),
          ranks(s.ranks()),
          images{s.simulated_nodes, heap_of(s), format_of(s)},
          memory(Segment::anonymous(images.heap.bytes() * ranks)),
          cluster(machine, heaps_in(memory.data(), images.heap.bytes(), ranks), images.heap.bytes(),
                  s.seed),
          cards(cluster),
          shares(ranks) {}

    // Sets the format and the real sizes of the rows that the next phase moves.
    void takes_rows(const RowFormat& format, double payload_bytes, double scale_bytes,
                    double slot_bytes) {
        images.format = format;
        cluster.row = {static_cast<size_t>(format.payload_bytes),
                       static_cast<size_t>(format.scale_bytes), payload_bytes, scale_bytes,
                       slot_bytes};
    }

    VirtualLaunch launch() { return {cluster, cards, settings.num_sms}; }

    // Adds the next rank's notify arguments and returns their layout.
    Layout& add_layout(int num_tokens, const int32_t* topk_idx);
    // Makes the arguments of dispatch and combine. has_intra_rank_pass: by rank, for dispatch.
    void make_calls(const std::vector<bool>& has_intra_rank_pass);
    // Add dispatch's intra-rank pass: own rows on `count` SMs, copies of rows on all SMs.
    void add_own_rows(VirtualLaunch& phase, int first_sm, int count);
    void add_permute(VirtualLaunch& phase);

    // Calls f with the fabric of a rank.
    template <class F>
    void with_fabric(int rank, bool charges_loads, F&& f) {
        if (settings.maps_rail || topology.nodes == 1) {
            VirtualFabric<true> fabric(cluster, cards, rank, images, charges_loads);
            f(fabric);
        } else {
            VirtualFabric<false> fabric(cluster, cards, rank, images, charges_loads);
            f(fabric);
        }
    }
};

namespace {

// Calls f(block, number, all) for each of the `all` warps of an exchange; each has a role.
template <class Roles, class F>
void for_roles(const Roles& roles, int channels, int sms, F&& f) {
    const int all = roles.warps() * channels, blocks = std::min(sms, all);
    for_warps(blocks, [&](int block, int warp) {
        const int number = role_of_warp(all, block, blocks, warp);
        if (number >= 0) f(block, number, all);
    });
}

void check_sms(const VirtualSettings& settings) {
    const int warps = settings.num_sms * kBlockWarps / settings.channels;
    if (!fits(roles_for<DispatchRoles>(settings.topology, warps), warps))
        throw std::invalid_argument("num_sms is " + std::to_string(settings.num_sms) +
                                    ", too few for " + std::to_string(settings.channels) +
                                    " channels");
}

}  // namespace

Layout& VirtualTransfers::State::add_layout(int num_tokens, const int32_t* topk_idx) {
    const int rank = static_cast<int>(notify.size());
    Share& share = shares[rank];
    Layout layout(topology, num_tokens, settings.topk, settings.num_experts, settings.channels,
                  nullptr);
    share.layout.resize(layout.size());
    layout.data = share.layout.data();
    share.counts.resize(2 * layout.local_experts());
    notify.push_back(
        {{topk_idx, sizeof(int32_t), 1, 0, share.counts.data()}, rank, images.heap, layout, 0});
    return notify.back().layout;
}

VirtualTransfers::VirtualTransfers(const Machine& machine, const VirtualSettings& settings,
                                   std::vector<const int32_t*> topk_idx)
    : state_(std::make_unique<State>(machine, settings)) {
    State& s = *state_;
    if (topk_idx.size() != static_cast<size_t>(s.ranks))
        throw std::invalid_argument("topk_idx: one of each simulated rank");
    if (settings.maps_rail && settings.simulated_nodes < s.topology.nodes)
        throw std::invalid_argument("simulated_nodes: all of them where the rail is mapped");
    check_sms(settings);
    for (const int32_t* ids : topk_idx) s.add_layout(settings.num_tokens, ids);
}

VirtualTransfers::VirtualTransfers(const Machine& machine, const VirtualSettings& settings,
                                   const VirtualPlan& plan)
    : state_(std::make_unique<State>(machine, settings)) {
    State& s = *state_;
    if (settings.simulated_nodes < s.topology.nodes)
        throw std::invalid_argument("simulated_nodes: all of them where a plan says what moves");
    check_sms(settings);
    for (int rank = 0; rank < s.ranks; ++rank) {
        Layout& layout = s.add_layout(plan.tokens[rank], nullptr);
        layout.is_planned = true;
        lay_out(layout, rank, plan.moves, plan.count, plan.tokens, 1, plan.leaving);
    }
    s.make_calls(plan.copies_apart);
}

VirtualTransfers::~VirtualTransfers() = default;

const ControlBlock& VirtualTransfers::control(int rank) const {
    return state_->cluster.control(rank);
}
uint64_t VirtualTransfers::rail_rows() const {
    uint64_t rows = 0;
    for (const NotifyArgs& args : state_->notify) rows += args.layout.totals().rail_rows;
    return rows;
}
uint64_t VirtualTransfers::peer_rows() const {
    uint64_t rows = 0;
    for (const NotifyArgs& args : state_->notify) {
        rows += args.layout.totals().received_rows;
        for (int channel = 0; channel < args.layout.channels; ++channel)
            rows -= args.layout.received(channel, args.rank);
    }
    return rows;
}

void VirtualTransfers::State::make_calls(const std::vector<bool>& has_intra_rank_pass) {
    dispatch.clear();
    combine.clear();
    for (int rank = 0; rank < ranks; ++rank) {
        Share& share = shares[rank];
        const VirtualSettings& v = settings;
        const Layout::Totals& totals = notify[rank].layout.totals();
        const size_t tokens = notify[rank].layout.num_tokens, rows = totals.expert_rows;
        share.dst_rows.resize(static_cast<size_t>(totals.received_rows) * v.topk);
        share.rail_experts.resize(static_cast<size_t>(totals.rail_rows) * v.topk);
        const RowFormat back = combine_format_of(v);
        share.x.resize(tokens * kPayloadBytes);
        share.scales.resize(tokens * kScaleBytes);
        share.y.resize(tokens * back.payload_bytes);
        share.weights.resize(tokens * v.topk);
        share.y_weights.resize(share.weights.size());
        share.rows.resize(rows * std::max(kPayloadBytes, back.payload_bytes));
        share.row_scales.resize(rows * kScaleBytes);
        share.row_weights.resize(rows);
        share.sums.resize(static_cast<size_t>(totals.received_rows) * back.payload_bytes);
        const auto bytes = [](auto& of) { return reinterpret_cast<char*>(of.data()); };
        const TransferArgs args{rank,
                                images.heap,
                                notify[rank].layout,
                                images.format,
                                0,
                                v.nvl_batch,
                                v.rdma_chunk,
                                share.dst_rows.data(),
                                share.rail_experts.data(),
                                totals.received_rows,
                                totals.rail_rows,
                                totals.expert_rows};
        dispatch.push_back({args, bytes(share.x), bytes(share.scales), bytes(share.weights),
                            bytes(share.rows), bytes(share.row_scales), bytes(share.row_weights)});
        dispatch.back().fills_tables = true;
        dispatch.back().clears_end = !notify[rank].layout.is_planned;
        dispatch.back().has_intra_rank_pass = has_intra_rank_pass[rank];
        combine.push_back({args, bytes(share.rows), bytes(share.row_weights), bytes(share.y),
                           bytes(share.y_weights)});
        combine.back().format = back;
        combine.back().is_combine = true;
        combine.back().sums = v.sums_apart ? share.sums.data() : nullptr;
        combine.back().sum_warps = sum_warps(topology);
    }
}

// Follows notify_kernel: each step needs the previous one to be finished on all channels.
VirtualPhase VirtualTransfers::notify(const OnProgress& on_progress) {
    State& s = *state_;
    if (s.notify.front().layout.is_planned) throw std::logic_error("a plan needs no notify");
    VirtualLaunch phase = s.launch();
    const int channels = s.settings.channels;
    const int roles = num_exchange_roles(s.images.heap);
    const int blocks = notify_blocks(channels, roles, s.settings.num_sms);
    const int warps = warps_of_blocks(blocks);
    const int exchangers = notify_exchangers(warps, roles);
    for (int rank = 0; rank < s.ranks; ++rank) {
        NotifyArgs& args = s.notify[rank];
        ++args.epoch;
        uint64_t* meetings = &s.shares[rank].meetings;
        const auto meet = [meetings, warps](VirtualWarp& warp) {
            const uint64_t before = warp.arrive<Scope::Rank>(meetings);
            const uint64_t all = (before / warps + 1) * warps;
            warp.wait_all(Wait::None, 1, [&](int) {
                return WaitCondition{VirtualWarp::acquire<Scope::Rank>(meetings), all, -1};
            });
        };
        const auto body = [&s, &args, meet, warps, exchangers, roles](VirtualFiber& fiber,
                                                                      int number) {
            VirtualWarp warp(s.cluster, fiber, Role::Notify, 0);
            if (number == 0) args.layout.totals() = {};
            count_own_rows(warp, args, number, warps, [&] { meet(warp); });
            if (args.layout.totals().bad_token) return;
            for (int channel = number - exchangers;
                 number >= exchangers && channel < args.layout.channels;
                 channel += warps - exchangers)
                index_channel(warp, args, channel);
            s.with_fabric(args.rank, true, [&](auto& fabric) {
                for (int role = number; number < exchangers && role < roles; role += exchangers) {
                    if (!run_exchange_role(warp, fabric, args, role)) return;
                }
            });
        };
        for_warps(blocks, [&](int block, int warp) {
            const int number = block * kBlockWarps + warp;
            phase.add(rank, block, [body, number](VirtualFiber& fiber) { body(fiber, number); });
        });
    }
    const VirtualPhase done = phase.run(on_progress);
    for (const NotifyArgs& args : s.notify) {
        if (const int bad = args.layout.totals().bad_token)
            throw std::invalid_argument("topk_idx of rank " + std::to_string(args.rank) +
                                        ", token " + std::to_string(bad - 1) +
                                        ": experts must be different, in [-1, E)");
    }

    s.make_calls(std::vector<bool>(s.ranks, s.settings.permutes_apart));
    return done;
}

namespace {

// SMs of the intra-rank pass: those that the exchange leaves free if they are a third, else all.
struct SideSms {
    int first, count;
    bool concurrent;

    SideSms(int all, int busy)
        : first(3 * (all - busy) >= all ? busy : 0),
          count(all - first),
          concurrent(first > 0 || busy == 0) {}
};

}  // namespace

void VirtualTransfers::State::add_own_rows(VirtualLaunch& phase, int first_sm, int count) {
    for (const DispatchArgs& args : dispatch) {
        if (!has_intra_rank_pass(args)) continue;
        for_warps(count, [&](int block, int warp) {
            const int number = block + warp * count, warps = count * kBlockWarps;
            if (number >= settings.channels * parts_of_own_rows(args, warps)) return;
            phase.add(args.rank, first_sm + block, [=, this, &args](VirtualFiber& fiber) {
                VirtualWarp one(cluster, fiber, Role::Launch, 0);
                write_own_rows(one, args, number, warps);
            });
        });
    }
}

void VirtualTransfers::State::add_permute(VirtualLaunch& phase) {
    const int sms = cluster.machine.sms, warps = warps_of_blocks(sms);
    for (const DispatchArgs& args : dispatch) {
        if (!has_intra_rank_pass(args)) continue;
        for_warps(sms, [&](int block, int warp) {
            const int part = block * kBlockWarps + warp;
            phase.add(args.rank, block, [this, &args, part, warps](VirtualFiber& fiber) {
                VirtualWarp warp(cluster, fiber, Role::Launch, 0);
                copy_to_other_output_rows(warp, args, part, warps);
                clear_unfilled(warp, args, part, warps);
            });
        });
    }
}

VirtualPhase VirtualTransfers::dispatch(const OnProgress& on_progress) {
    State& s = *state_;
    if (s.dispatch.empty()) throw std::logic_error("notify comes first");
    s.cluster.call = ++s.calls;
    s.takes_rows(State::format_of(s.settings), s.settings.payload_bytes, s.settings.scale_bytes,
                 s.settings.slot_bytes);
    const int channels = s.settings.channels, sms = s.settings.num_sms;
    const auto roles = roles_for<DispatchRoles>(s.topology, sms * kBlockWarps / channels);
    const SideSms side(s.cluster.machine.sms, sms);
    uint64_t expected = 0;
    for (const DispatchArgs& args : s.dispatch) {
        const Layout::Totals& totals = args.layout.totals();
        expected += args.layout.num_tokens + totals.received_rows + 2 * totals.rail_rows;
    }

    VirtualLaunch exchange = s.launch();
    for (DispatchArgs& args : s.dispatch) {
        args.call = s.calls;
        for_roles(roles, channels, sms, [&](int block, int number, int all) {
            exchange.add(args.rank, block, [&s, &args, roles, number, all](VirtualFiber& fiber) {
                const int channel = number / roles.warps();
                auto warp_of = [&](Role role) {
                    return VirtualWarp(s.cluster, fiber, role, channel);
                };
                s.with_fabric(args.rank, false, [&](auto& fabric) {
                    run_dispatch_role(warp_of, fabric, args, roles, channel,
                                      number % roles.warps());
                });
                if (has_intra_rank_pass(args)) return;
                VirtualWarp warp(s.cluster, fiber, fiber.task.role, channel);
                clear_unfilled(warp, args, number, all);
            });
        });
    }
    const bool passes =
        std::ranges::any_of(s.dispatch, [](const auto& args) { return has_intra_rank_pass(args); });
    if (passes && side.concurrent) s.add_own_rows(exchange, side.first, side.count);
    VirtualPhase done = exchange.run(on_progress, expected);
    if (passes) {
        if (!side.concurrent) {
            VirtualLaunch own = s.launch();
            s.add_own_rows(own, 0, side.count);
            done.append(own.run(), 0);
        }
        VirtualLaunch permute = s.launch();
        s.add_permute(permute);
        done.append(permute.run(), side.concurrent ? s.cluster.machine.join : 0);
    }
    for (DispatchArgs& args : s.dispatch) args.fills_tables = false;
    return done;
}

VirtualPhase VirtualTransfers::combine(const OnProgress& on_progress) {
    State& s = *state_;
    if (s.dispatch.empty() || s.dispatch.front().fills_tables)
        throw std::logic_error("a dispatch comes first");
    s.cluster.call = ++s.calls;
    s.takes_rows(State::combine_format_of(s.settings), s.settings.combine_bytes, 0,
                 s.settings.combine_slot_bytes);
    const int channels = s.settings.channels, sms = s.settings.num_sms;
    const auto roles = roles_for<CombineRoles>(s.topology, sms * kBlockWarps / channels,
                                               s.combine.front().max_receivers());
    const SideSms side(s.cluster.machine.sms, sms);
    uint64_t expected = 0;
    for (const CombineArgs& args : s.combine) {
        const Layout::Totals& totals = args.layout.totals();
        expected += args.layout.num_tokens + totals.received_rows + totals.rail_rows;
    }
    const bool passes = s.settings.sums_apart;
    const auto add_sums = [&](VirtualLaunch& phase) {
        for (const CombineArgs& args : s.combine) {
            for_warps(side.count, [&](int block, int warp) {
                const int number = block + warp * side.count, warps = side.count * kBlockWarps;
                if (number >= pieces_of_sums(args)) return;
                phase.add(args.rank, side.first + block, [=, &s, &args](VirtualFiber& fiber) {
                    VirtualWarp one(s.cluster, fiber, Role::Launch, 0);
                    s.with_fabric(args.rank, false, [&](auto& fabric) {
                        sum_all_rows<BFloat16, false>(one, fabric, args, number, warps);
                    });
                });
            });
        }
    };
    for (CombineArgs& args : s.combine) args.call = s.calls;
    VirtualPhase before;
    if (passes && !side.concurrent) {
        VirtualLaunch sums = s.launch();
        add_sums(sums);
        before = sums.run();
    }
    VirtualLaunch exchange = s.launch();
    for (const CombineArgs& args : s.combine) {
        for_roles(roles, channels, sms, [&](int block, int number, int) {
            exchange.add(args.rank, block, [&s, &args, roles, number](VirtualFiber& fiber) {
                const int channel = number / roles.warps();
                auto warp_of = [&](Role role) {
                    return VirtualWarp(s.cluster, fiber, role, channel);
                };
                s.with_fabric(args.rank, false, [&](auto& fabric) {
                    run_combine_role<BFloat16, false>(warp_of, fabric, args, roles, channel,
                                                      number % roles.warps());
                });
            });
        });
    }
    if (passes && side.concurrent) add_sums(exchange);
    VirtualPhase done = exchange.run(on_progress, expected);
    if (passes && !side.concurrent) {
        before.append(done, 0);
        return before;
    }
    return done;
}

}  // namespace ep
