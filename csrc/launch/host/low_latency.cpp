#include "launch/host/low_latency.h"

#include <cstring>

#include "launch/host/group.inl"
#include "protocol/low_latency_combine.h"
#include "protocol/low_latency_dispatch.h"

namespace ep {

static_assert(ReachesAllRanks<HostFabric, HostWarp> &&
              ReachesAllRanks<MappedHostFabric, HostWarp> &&
              ReachesAllRanks<QueueFabric, HostWarp>);

HostLowLatency::HostLowLatency(HostGroup& group, const LowLatencyHeap& heap,
                               const std::vector<char*>& heaps, int warps)
    : group_(group), heap_(heap), warps_(warps) {
    if (group.nic_)
        queues_ = std::make_unique<HostQueues>(*group.nic_, heap, group.ranks().front(), heaps, 1);
    for (const int rank : group.ranks()) {
        own_heaps_.push_back(heaps[rank]);
        fabrics_.push_back(group.fabric_of(rank, heaps, queues_.get()));
    }
}

HostLowLatency::~HostLowLatency() {
    std::mt19937_64 any_order;
    while (group_.network_ && group_.network_->deliver(any_order)) {
    }
}

void HostLowLatency::reset() {
    for (char* heap : own_heaps_) std::memset(heap, 0, heap_.bytes());
}

// Runs share.operator()<kHalf, kLines>(warp, call, team) on every warp of every rank.
template <LowLatencyLaunches kHalf, class Args, class Share>
void HostLowLatency::run_half(const std::vector<Args>& args,
                              const std::function<bool()>& interrupted, Share share) {
    constexpr bool kReceives = receives(kHalf);
    constexpr LowLatencyHalf kOwn = kReceives ? LowLatencyHalf::Receive : LowLatencyHalf::Send;
    constexpr HostGroup::Count kTransfer = &Calls::transfer, kCount = counter_of(Args::kKind, kOwn);
    const bool one_hop = heap_.sums_at_expert;
    const Role role = one_hop ? in_one_hop(role_of(Args::kKind, kOwn)) : role_of(Args::kKind, kOwn);
    std::vector<std::vector<RoleTask>> tasks(args.size());
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                              group_.states_.front().timeout);
    for (size_t i = 0; i < args.size(); ++i) {
        RankState& state = group_.states_[i];
        const auto call_of = [this, i, &args](auto& fabric) {
            return kReceives ? begun_call(fabric, args[i]) : next_call(fabric, args[i]);
        };
        state.deadline = deadline;
        uint64_t& counted = std::visit(
            [&](auto& fabric) -> uint64_t& {
                const auto call = call_of(fabric);
                return *call.word(heap_.counted(Args::kKind, call.bank));
            },
            fabrics_[i]);
        if (!kReceives) counted = state.next(one_hop ? kTransfer : kCount);
        state.call = counted;
        if (!kReceives) state.note_sends(one_hop ? Sends::Mode::Transfer : Args::kMode, args[i]);
        for (int number = 0; number < warps_; ++number) {
            tasks[i].push_back(
                {&state, [=, this, &state](Executor& executor) {
                     HostWarp warp(executor, state, role, number);
                     const Team team{number, warps_};
                     std::visit(
                         [&](auto& fabric) {
                             const auto call = call_of(fabric);
                             if (call.args.by_lines())
                                 return share.template operator()<kHalf, true>(warp, call, team);
                             share.template operator()<kHalf, false>(warp, call, team);
                         },
                         fabrics_[i]);
                 }});
        }
    }
    struct EndOfCall {
        std::vector<RankState>& states;
        ~EndOfCall() {
            for (RankState& state : states)
                state.deadline = std::chrono::steady_clock::time_point::max();
        }
    } end{group_.states_};
    if constexpr (kReceives) {
        group_.run_to_outputs(one_hop ? nullptr : kCount, one_hop ? kTransfer : kCount, false, args,
                              {std::move(tasks)}, interrupted);
    } else {
        group_.run(one_hop ? kTransfer : kCount, one_hop ? nullptr : kCount, true,
                   {std::move(tasks)}, interrupted);
    }
}

template <class Args, class Share>
void HostLowLatency::run(LowLatencyLaunches launches, const std::vector<Args>& args,
                         const std::function<bool()>& interrupted, Share share) {
    using enum LowLatencyLaunches;
    if (sends(launches)) run_half<Send>(args, interrupted, share);
    if (receives(launches)) run_half<Receive>(args, interrupted, share);
}

void HostLowLatency::dispatch(LowLatencyLaunches launches,
                              const std::vector<LowLatencyDispatchArgs>& args,
                              const std::function<bool()>& interrupted) {
    run(launches, args, interrupted,
        []<LowLatencyLaunches kHalf, bool kLines>(HostWarp& warp, const auto& call,
                                                  const Team& team) {
            with_row_kind(call.args.row_kind(), [&]<RowKind kRows>() {
                low_latency_dispatch<kHalf, kRows, kLines>(warp, call, team);
            });
        });
}

void HostLowLatency::combine(LowLatencyLaunches launches,
                             const std::vector<LowLatencyCombineArgs>& args, DType dtype,
                             const std::function<bool()>& interrupted) {
    with_type(dtype, [&]<class T>() {
        run(launches, args, interrupted,
            []<LowLatencyLaunches kHalf, bool kLines>(HostWarp& warp, const auto& call,
                                                      const Team& team) {
                low_latency_combine<kHalf, T, kLines>(warp, call, team);
            });
    });
}

}  // namespace ep
