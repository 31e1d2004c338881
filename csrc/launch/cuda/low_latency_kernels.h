#pragma once

#include "core/outputs.h"
#include "launch/cuda/kernels.h"
#include "protocol/low_latency_combine.h"
#include "protocol/low_latency_dispatch.h"

namespace ep {

// A launch for one rank, of one half of a call or of both. All of it is a kernel parameter, and no
// number of a call is in it: a captured graph replays it. Any number of blocks does the work. Those
// of one half need not be on the GPU together, because none waits for another; those of both halves
// have to come there in the end, because what one waits for another rank's may have to send.
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

// If the call was given up nobody can take its outputs for data.
template <class Args>
__device__ __forceinline__ void poison(const Args& args) {
    for (const Outputs::Part& part : outputs_of(args).parts)
        rows::fill<Outputs::kPoison>(part.data, part.bytes);
}

// share(warp, call, team) -> Ended: what each warp does.
//
// Where the call's outputs are written every warp arrives in the end, however its share has ended:
// the last one knows that nobody writes any more.
template <LowLatencyLaunches kLaunches, bool kLines, class L, class Share>
__device__ __forceinline__ void run_launch(const L& launch, Role role, Share&& share) {
    constexpr bool kSends = kLaunches != LowLatencyLaunches::Receive;
    constexpr bool kReceives = kLaunches != LowLatencyLaunches::Send;
    constexpr LowLatencyKind kKind = L::Args::kKind;
    // no heap has lines and masks
    using Fabric = std::conditional_t<kLines, NeverMasking<typename L::Fabric>, typename L::Fabric>;
    if constexpr (Architecture::kHasEarlyLaunches) {
        DeviceWarp::begin_block();
        ptx::wait_for_launch_before();
    }
    Fabric fabric(launch.fabric, launch.rank.rank);
    const LowLatencyHeap& heap = launch.args.heap;
    const Team team = team_of_grid();
    const auto call = kSends ? next_call(fabric, launch.args) : begun_call(fabric, launch.args);
    DeviceWarp warp(launch.rank, call.number, role, team.warp, bulk_buffers());
    auto note = [&](Calls& calls) {
        const int kind = static_cast<int>(kKind);
        if (kSends) warp.template credit<Scope::System>(&calls.sent[kind], call.number);
        if (kReceives)
            warp.template credit<Scope::System>(&calls.received[kind][call.bank], call.number);
    };
    Ended ended = Ended::Badly;
    if (!is_aborted(launch.rank)) {
        if (team.warp == team.warps / 4) {  // in small batches it has nothing else to do
            note(launch.rank.control->entered);
            if (kSends) {
                const auto& args = launch.args;
                uint64_t& sends = launch.rank.control->sends_in(args.kMode, call.number);
                warp.template credit<Scope::System>(
                    &sends, Sends::word(args.kind(), call.number, args.format));
                begin_call(launch.rank, heap.topology.world());
            }
        }
        warp.begin_half(role);
        ended = share(warp, call, team);
    }
    if (ended == Ended::Last) note(launch.rank.control->finished);
    if constexpr (kReceives) {
        uint64_t* joins = fabric.template own<uint64_t>(heap.receive_joins(kKind));
        const bool last = ended == Ended::Badly ? is_last(warp, joins, team) : ended == Ended::Last;
        if (last && is_aborted(launch.rank)) poison(launch.args);
    }
}

template <LowLatencyLaunches kLaunches, bool kQuantize, bool kLines, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    low_latency_dispatch_kernel(const __grid_constant__ L launch) {
    constexpr Role kRole = kLaunches == LowLatencyLaunches::Receive ? Role::LowLatencyReceiver
                                                                    : Role::LowLatencySender;
    run_launch<kLaunches, kLines>(
        launch, kRole, [](auto& warp, const auto& call, const Team& team) {
            if constexpr (kLaunches == LowLatencyLaunches::Send) {
                return low_latency_dispatch_send<kQuantize, kLines>(warp, call, team);
            } else if constexpr (kLaunches == LowLatencyLaunches::Receive) {
                return low_latency_dispatch_receive<kLines>(warp, call, team);
            } else {
                return low_latency_dispatch<kQuantize, kLines>(warp, call, team);
            }
        });
}

template <LowLatencyLaunches kLaunches, class T, bool kLines, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    low_latency_combine_kernel(const __grid_constant__ L launch) {
    constexpr Role kRole = kLaunches == LowLatencyLaunches::Receive
                               ? Role::LowLatencyCombineReceiver
                               : Role::LowLatencyCombineSender;
    run_launch<kLaunches, kLines>(
        launch, kRole, [](auto& warp, const auto& call, const Team& team) {
            if constexpr (kLaunches == LowLatencyLaunches::Send) {
                return low_latency_combine_send<T, kLines>(warp, call, team);
            } else if constexpr (kLaunches == LowLatencyLaunches::Receive) {
                return low_latency_combine_receive<T, kLines>(warp, call, team);
            } else {
                return low_latency_combine<T, kLines>(warp, call, team);
            }
        });
}

}  // namespace kernels
}  // namespace ep
