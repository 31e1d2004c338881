#pragma once

#include "launch/cuda/kernels.h"
#include "protocol/low_latency_combine.h"
#include "protocol/low_latency_dispatch.h"

namespace ep {

// The kernel parameter of a launch for one rank, of one half of a call or of both. It holds no call
// number, so that a captured graph can be replayed. It works with any number of blocks. Those of
// one half need not be on the GPU together, because none waits for another. Those of both halves
// must all get there, because they may wait for rows that other ranks' blocks have yet to send.
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

// Numbers the warps so that neighbours are on different SMs: then few rows use all SMs.
EP_FN Team team_of_grid() {
    return {static_cast<int>(warp_of_block() * gridDim.x + blockIdx.x),
            static_cast<int>(gridDim.x * (blockDim.x / 32))};
}

// Notes that a launch was entered, or that it has finished, and returns the buffer's number of its
// call (see Calls). Called by one warp.
template <LowLatencyLaunches kLaunches, class C>
EP_FN uint64_t count_half(DeviceWarp& warp, const C& call, ControlBlock* control, bool enters) {
    constexpr auto kSent = counter_of(C::kKind, LowLatencyHalf::Send);
    constexpr auto kReceived = counter_of(C::kKind, LowLatencyHalf::Receive);
    const bool one_hop = call.heap().sums_at_expert;
    // Plain loads: launches of this rank alone write these, and arrivals order those of this one.
    const auto last = [&](const Calls& calls) {
        return calls.*(one_hop ? &Calls::transfer : kSent);
    };
    // Launches follow each other, so a call is the first one that has not finished to be sent.
    uint64_t number = last(control->finished) + 1;
    uint64_t* const counted = call.word(call.heap().counted(C::kKind, call.bank));
    if (one_hop) {  // a dispatch may be received once more, which is not counted
        const uint64_t entered = last(control->entered);
        number = enters ? entered + 1 : number < entered ? number : entered;
    } else if constexpr (kLaunches == LowLatencyLaunches::Receive) {
        number = *counted;
    }
    Calls& calls = enters ? control->entered : control->finished;
    if (one_hop) {
        if (enters ? sends(kLaunches) : receives(kLaunches))
            warp.template credit<Scope::System>(&calls.transfer, number);
        return number;
    }
    if constexpr (kLaunches == LowLatencyLaunches::Send) {
        if (enters) warp.lanes(1, [&](int) { *counted = number; });
    }
    if (sends(kLaunches)) warp.template credit<Scope::System>(&(calls.*kSent), number);
    if (receives(kLaunches)) warp.template credit<Scope::System>(&(calls.*kReceived), number);
    return number;
}

// Runs share(warp, call, team), which returns Ended, on each warp.
//
// In a launch that writes the call's outputs every warp arrives, however its share has ended: so
// the last one knows that no other warp writes any more.
template <LowLatencyLaunches kLaunches, bool kLines, class L, class Share>
EP_FN void run_launch(const L& launch, Share&& share) {
    constexpr bool kSends = sends(kLaunches), kReceives = receives(kLaunches);
    constexpr LowLatencyKind kKind = L::Args::kKind;
    constexpr Role kRole = role_of(kKind, kSends ? LowLatencyHalf::Send : LowLatencyHalf::Receive);
    // A heap never has both lines and masks.
    using Fabric = std::conditional_t<kLines, NeverMasking<typename L::Fabric>, typename L::Fabric>;
    if constexpr (Architecture::kHasEarlyLaunches) {
        DeviceWarp::begin_block();
        ptx::wait_for_previous_launch();
    }
    Fabric fabric(launch.fabric, launch.rank.rank);
    const LowLatencyHeap& heap = launch.args.heap;
    const Team team = team_of_grid();
    const auto call = kSends ? next_call(fabric, launch.args) : begun_call(fabric, launch.args);
    DeviceWarp warp(launch.rank, 0, kRole, team.warp, bulk_buffers());  // see name_call
    Ended ended = Ended::Failed;
    if (!is_aborted(launch.rank)) {
        if (team.warp == team.warps / 4) {  // a warp that has no rows in small batches
            const uint64_t number = count_half<kLaunches>(warp, call, launch.rank.control, true);
            if (kSends) {
                const auto& args = launch.args;
                const auto mode = heap.sums_at_expert ? Sends::Mode::Transfer : args.kMode;
                uint64_t& sends = launch.rank.control->sends_in(mode, number);
                warp.template credit<Scope::System>(&sends,
                                                    Sends::word(args.kind(), number, args.format));
                begin_call(launch.rank, heap.topology.world());
            }
        }
        warp.begin_half(kRole);
        ended = share(warp, call, team);
    }
    if (ended == Ended::Last) count_half<kLaunches>(warp, call, launch.rank.control, false);
    if constexpr (kReceives) {
        uint64_t* joins = fabric.template own<uint64_t>(heap.receive_joins(kKind));
        const bool last =
            ended == Ended::Failed ? is_last(warp, joins, team) : ended == Ended::Last;
        if (last && is_aborted(launch.rank)) poison(outputs_of(launch.args));
    }
}

template <LowLatencyLaunches kLaunches, RowKind kRows, bool kLines, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    low_latency_dispatch_kernel(const __grid_constant__ L launch) {
    run_launch<kLaunches, kLines>(launch, [](auto& warp, const auto& call, const Team& team) {
        return low_latency_dispatch<kLaunches, kRows, kLines>(warp, call, team);
    });
}

// The kernel of a dispatch. A half has instances for the kinds of rows that it treats differently.
template <LowLatencyLaunches kLaunches, bool kLines, class L>
auto low_latency_dispatch_of(RowKind kind) {
    if constexpr (kLaunches != LowLatencyLaunches::Receive) {
        if (kind == RowKind::Quantized)
            return low_latency_dispatch_kernel<kLaunches, RowKind::Quantized, kLines, L>;
    }
    if constexpr (kLaunches != LowLatencyLaunches::Send && kLines) {
        if (kind == RowKind::Flat)
            return low_latency_dispatch_kernel<kLaunches, RowKind::Flat, kLines, L>;
    }
    return low_latency_dispatch_kernel<kLaunches, RowKind::Grouped, kLines, L>;
}

template <LowLatencyLaunches kLaunches, class T, bool kLines, class L>
__global__ void __launch_bounds__(kBlockThreads, 1)
    low_latency_combine_kernel(const __grid_constant__ L launch) {
    run_launch<kLaunches, kLines>(launch, [](auto& warp, const auto& call, const Team& team) {
        return low_latency_combine<kLaunches, T, kLines>(warp, call, team);
    });
}

}  // namespace kernels
}  // namespace ep
