#pragma once

#include "launch/cuda/kernels.h"
#include "protocol/low_latency_combine.h"
#include "protocol/low_latency_dispatch_receive.h"
#include "protocol/low_latency_dispatch_send.h"

namespace ep {

// A launch of one half for one rank. All of it is a kernel parameter, and no number of a call is in
// it: a captured graph replays it. Any number of blocks does the work, and none waits for another:
// they need not be on the GPU together.
template <class FabricParams, class LowLatencyArgsOfKind>
struct LowLatencyLaunch {
    using Fabric = typename FabricParams::Fabric;
    using Args = LowLatencyArgsOfKind;

    FabricParams fabric;
    Args args;
    DeviceRank rank;
};

template <class P>
using LowLatencyDispatchLaunch = LowLatencyLaunch<P, LowLatencyDispatchArgs>;
template <class P>
using LowLatencyCombineLaunch = LowLatencyLaunch<P, LowLatencyCombineArgs>;

namespace kernels {

// Neighbours are on different SMs: few rows spread over all of them.
__device__ __forceinline__ Team team_of_grid() {
    return {static_cast<int>(warp_of_block() * gridDim.x + blockIdx.x),
            static_cast<int>(gridDim.x * (blockDim.x / 32))};
}

// half(warp, fabric, args, team), under one deadline. It returns whether this warp was the last.
template <class L, class Half>
__device__ __forceinline__ void run_half(const L& launch, Role role, bool receive, Half&& half) {
    if (is_aborted(launch.rank)) return;
    typename L::Fabric fabric(launch.fabric, launch.rank.rank);
    const Team team = team_of_grid();
    const uint64_t call =
        receive ? *launch.args.call
                : *fabric.template own<uint64_t>(launch.args.heap.sent(L::Args::kKind)) + 1;
    constexpr int kKind = static_cast<int>(L::Args::kKind);
    auto count = [&](Calls& calls) -> uint64_t* {
        return receive ? &calls.received[kKind][call % LowLatencyHeap::kBanks] : &calls.sent[kKind];
    };
    DeviceWarp warp(launch.rank, call, role, team.warp, bulk_buffers());
    if (team.warp == 0) {
        warp.template credit<Scope::System>(count(launch.rank.control->entered), call);
        if (!receive) begin_call(launch.rank, launch.args.heap.topology.world());
    }
    warp.start_deadline();
    if (half(warp, fabric, launch.args, team))
        warp.template credit<Scope::System>(count(launch.rank.control->finished), call);
}

template <bool kQuantize, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    low_latency_dispatch_send_kernel(const __grid_constant__ L launch) {
    run_half(launch, Role::LowLatencySender, false,
             [](auto& warp, auto& fabric, const auto& args, const Team& team) {
                 return low_latency_dispatch_send<kQuantize>(warp, fabric, args, team);
             });
}

template <class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    low_latency_dispatch_receive_kernel(const __grid_constant__ L launch) {
    run_half(launch, Role::LowLatencyReceiver, true,
             [](auto& warp, auto& fabric, const auto& args, const Team& team) {
                 return low_latency_dispatch_receive(warp, fabric, args, team);
             });
}

template <class T, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    low_latency_combine_send_kernel(const __grid_constant__ L launch) {
    run_half(launch, Role::LowLatencyCombineSender, false,
             [](auto& warp, auto& fabric, const auto& args, const Team& team) {
                 return low_latency_combine_send<T>(warp, fabric, args, team);
             });
}

template <class T, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    low_latency_combine_receive_kernel(const __grid_constant__ L launch) {
    run_half(launch, Role::LowLatencyCombineReceiver, true,
             [](auto& warp, auto& fabric, const auto& args, const Team& team) {
                 return low_latency_combine_receive<T>(warp, fabric, args, team);
             });
}

}  // namespace kernels
}  // namespace ep
