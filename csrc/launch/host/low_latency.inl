#pragma once

#include "launch/host/group.inl"
#include "launch/host/low_latency.h"
#include "protocol/low_latency_combine.h"
#include "protocol/low_latency_dispatch.h"

namespace ep {

// Calls f.operator()<value>().
template <class F>
void with_bool(bool value, F&& f) {
    value ? f.template operator()<true>() : f.template operator()<false>();
}

// Runs body.operator()<kLines>(warp, call, team) on every warp of every rank.
template <class Warp, class Args, class Body>
void HostLowLatency::launch(Role role, bool receive, const std::vector<Args>& args,
                            const std::function<bool()>& interrupted, Body body) {
    static_assert(ReachesAllRanks<HostFabric, Warp> && ReachesAllRanks<MappedHostFabric, Warp> &&
                  ReachesAllRanks<QueueFabric, Warp>);
    std::vector<std::vector<RoleTask>> tasks(args.size());
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                              group_.states_.front().timeout);
    for (size_t i = 0; i < args.size(); ++i) {
        RankState& state = group_.states_[i];
        state.deadline = deadline;
        state.call =
            receive ? *args[i].call
                    : *reinterpret_cast<uint64_t*>(own_heaps_[i] + heap_.sent(Args::kKind)) + 1;
        if (!receive) state.note_sends(Args::kMode, args[i]);
        for (int number = 0; number < warps_; ++number) {
            tasks[i].push_back(
                {&state, [&state, role, receive, number, body, this, i, &args](Executor& executor) {
                     Warp warp(executor, state, role, number);
                     std::visit(
                         [&](auto& fabric) {
                             const auto call =
                                 receive ? begun_call(fabric, args[i]) : next_call(fabric, args[i]);
                             with_bool(args[i].by_lines(), [&]<bool kLines>() {
                                 body.template operator()<kLines>(warp, call, Team{number, warps_});
                             });
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
    constexpr int kKind = static_cast<int>(Args::kKind);
    const HostGroup::Count received = [](Calls& calls, uint64_t number) -> uint64_t& {
        return calls.received[kKind][number % LowLatencyHeap::kBanks];
    };
    const HostGroup::Count sent = [](Calls& calls, uint64_t) -> uint64_t& {
        return calls.sent[kKind];
    };
    if (receive) {
        group_.run_to_outputs(received, false, args, {std::move(tasks)}, interrupted);
    } else {
        group_.run(sent, true, {std::move(tasks)}, interrupted);
    }
}

template <class Warp>
void HostLowLatency::dispatch_send(const std::vector<LowLatencyDispatchArgs>& args,
                                   const std::function<bool()>& interrupted) {
    launch<Warp>(Role::LowLatencySender, false, args, interrupted,
                 []<bool kLines>(Warp& warp, const auto& call, const Team& team) {
                     with_row_kind(call.args.row_kind(), [&]<RowKind kRows>() {
                         low_latency_dispatch_send<kRows, kLines>(warp, call, team);
                     });
                 });
}

template <class Warp>
void HostLowLatency::dispatch_receive(const std::vector<LowLatencyDispatchArgs>& args,
                                      const std::function<bool()>& interrupted) {
    launch<Warp>(Role::LowLatencyReceiver, true, args, interrupted,
                 []<bool kLines>(Warp& warp, const auto& call, const Team& team) {
                     with_row_kind(call.args.row_kind(), [&]<RowKind kRows>() {
                         low_latency_dispatch_receive<kRows, kLines>(warp, call, team);
                     });
                 });
}

template <class Warp>
void HostLowLatency::combine_send(const std::vector<LowLatencyCombineArgs>& args, DType dtype,
                                  const std::function<bool()>& interrupted) {
    with_type(dtype, [&]<class T>() {
        launch<Warp>(Role::LowLatencyCombineSender, false, args, interrupted,
                     []<bool kLines>(Warp& warp, const auto& call, const Team& team) {
                         low_latency_combine_send<T, kLines>(warp, call, team);
                     });
    });
}

template <class Warp>
void HostLowLatency::combine_receive(const std::vector<LowLatencyCombineArgs>& args, DType dtype,
                                     const std::function<bool()>& interrupted) {
    with_type(dtype, [&]<class T>() {
        launch<Warp>(Role::LowLatencyCombineReceiver, true, args, interrupted,
                     []<bool kLines>(Warp& warp, const auto& call, const Team& team) {
                         low_latency_combine_receive<T, kLines>(warp, call, team);
                     });
    });
}

}  // namespace ep
