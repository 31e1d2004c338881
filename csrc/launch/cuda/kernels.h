#pragma once

#include "core/args.h"
#include "exec/device/device_warp.h"
#include "exec/device/shared_memory.h"
#include "launch/cuda/joint.h"
#include "protocol/combine.h"
#include "protocol/coordinators.h"
#include "protocol/dispatch.h"
#include "protocol/layout.h"
#include "protocol/notify.h"

// The protocol's roles as kernels, for any fabric. Blocks [i * blocks, (i + 1) * blocks) of a grid
// belong to the i-th rank of this process.
namespace ep::kernels {

__device__ __forceinline__ int warp_of_block() { return threadIdx.x / 32; }

// This block's rank, its number among that rank's, and its warp's among all of them.
template <class J>
struct Place {
    int index;
    int block;
    int warp;
    int warps;
    __device__ __forceinline__ explicit Place(const J& joint)
        : index(blockIdx.x / joint.blocks_per_rank),
          block(blockIdx.x % joint.blocks_per_rank),
          warp(block * (blockDim.x / 32) + warp_of_block()),
          warps(joint.blocks_per_rank * (blockDim.x / 32)) {}
};

__device__ __forceinline__ BulkBuffers& bulk_buffers() {
    BulkBuffers& buffers = reinterpret_cast<BulkBuffers*>(dynamic_shared_memory())[warp_of_block()];
    buffers.init();
    return buffers;
}

// ---- notify, in three launches, since each step needs the one before on all channels

template <class J>
__global__ void __launch_bounds__(kBlockThreads, 1) count_kernel(const __grid_constant__ J joint) {
    const Place<J> place(joint);
    DeviceWarp warp(joint.ranks[place.index], 0, Role::Notify, 0, bulk_buffers());
    const NotifyArgs& args = joint.args[place.index];
    for (int channel = place.warp; channel < args.layout.channels; channel += place.warps)
        count_channel(warp, args, channel);
}

template <class J>
__global__ void __launch_bounds__(kBlockThreads, 1) sum_kernel(const __grid_constant__ J joint) {
    const Place<J> place(joint);
    DeviceWarp warp(joint.ranks[place.index], *joint.epochs[place.index] + 1, Role::Notify, 0,
                    bulk_buffers());
    const NotifyArgs& args = joint.args[place.index];
    if (args.layout.totals().bad_token) {
        if (place.warp == 0) warp.fail(Outcome::BadInput, Wait::None, Need{});
        return;
    }
    for (int expert = place.warp; expert < args.layout.num_experts; expert += place.warps)
        sum_channels(warp, args, expert, 1);
}

// The last warp exchanges counts, which needs the sums only, while the others number the rows.
template <class J>
__global__ void __launch_bounds__(kBlockThreads, 1)
    exchange_kernel(const __grid_constant__ J joint) {
    const Place<J> place(joint);
    const DeviceRank& rank = joint.ranks[place.index];
    NotifyArgs args = joint.args[place.index];
    if (args.layout.totals().bad_token || is_aborted(rank)) return;
    if (place.warp == place.warps - 1) {
        // Counted here and not by the host, because a captured graph replays.
        args.epoch = *joint.epochs[place.index] + 1;
        DeviceWarp warp(rank, args.epoch, Role::Notify, 0, bulk_buffers());
        typename J::Fabric fabric(joint.fabric, args.rank);
        notify(warp, fabric, args);
        warp.lanes(1, [&](int) { *joint.epochs[place.index] = args.epoch; });
    } else {
        DeviceWarp warp(rank, 0, Role::Notify, 0, bulk_buffers());
        for (int channel = place.warp; channel < args.layout.channels; channel += place.warps - 1)
            index_channel(warp, args, channel);
    }
}

// ---- dispatch and combine

// A notify that failed leaves no layout behind, and its handle may be used all the same once the
// buffer has been reset. Asked by the first kernel of a launch.
template <class J, class Args>
__device__ __forceinline__ bool has_layout(const J& joint, const Place<J>& place,
                                           const Args& args) {
    if (args.layout.totals().epoch) return true;
    if (place.warp == 0) {
        DeviceWarp warp(joint.ranks[place.index], args.call, Role::Launch, 0, bulk_buffers());
        warp.fail(Outcome::NoLayout, Wait::None, Need{});
    }
    return false;
}

// Rows that no token fills, a piece a warp. Before the dispatch, which writes none of them.
template <class J>
__global__ void __launch_bounds__(kBlockThreads, 1) clear_kernel(const __grid_constant__ J joint) {
    constexpr int64_t kPiece = 16;  // rows
    const Place<J> place(joint);
    const DispatchArgs& args = joint.args[place.index];
    const Layout& layout = args.layout;
    if (is_aborted(joint.ranks[place.index]) || !has_layout(joint, place, args)) return;
    DeviceWarp warp(joint.ranks[place.index], args.call, Role::Launch, 0, bulk_buffers());
    for (int expert = place.warp; expert < layout.local_experts(); expert += place.warps)
        clear_padding(warp, args, expert);
    const int64_t end = layout.expert_start(layout.local_experts());
    for (int64_t first = end + kPiece * place.warp; first < args.max_rows;
         first += kPiece * place.warps) {
        clear_rows(warp, args, first, first + kPiece);
    }
}

template <class F>
__device__ __forceinline__ void run_dispatch_role(const DeviceRank& rank, BulkBuffers& buffers,
                                                  F& fabric, const DispatchArgs& args,
                                                  const DispatchRoles& roles, int channel,
                                                  int role) {
    auto warp = [&](Role name) { return DeviceWarp(rank, args.call, name, channel, buffers); };
    const int other_nodes = roles.nodes - 1;
    auto other_node = [&](int i) { return i + (i >= args.node()); };
    if (role == 0) {
        DeviceWarp w = warp(Role::NvlSender);
        nvl_sender(w, fabric, args, channel);
    } else if ((role -= 1) < roles.servers) {
        DeviceWarp w = warp(Role::Receiver);
        const int share = roles.ranks_per_server();
        receiver(w, fabric, args, channel, role * share, share);
    } else if ((role -= roles.servers) < other_nodes) {
        DeviceWarp w = warp(Role::RdmaSender);
        rdma_sender(w, fabric, args, channel, other_node(role));
    } else if ((role -= other_nodes) < other_nodes) {
        DeviceWarp w = warp(Role::Forwarder);
        forwarder(w, fabric, args, channel, other_node(role));
    } else if ((role -= other_nodes) < roles.coordinators()) {
        DeviceWarp w = warp(Role::SenderCoordinator);
        sender_coordinator(w, fabric, args, RailCounts{args.layout, args.node(), false}, channel,
                           32 * role);
    } else {
        DeviceWarp w = warp(Role::ForwarderCoordinator);
        forwarder_coordinator(w, fabric, args, RailCounts{args.layout, args.node(), false}, channel,
                              32 * (role - roles.coordinators()));
    }
}

template <class J>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_kernel(const __grid_constant__ J joint) {
    const Place<J> place(joint);
    const DispatchArgs& args = joint.args[place.index];
    const int warps = joint.roles.warps();
    const int number = role_of_warp(warps * args.layout.channels, place.block,
                                    joint.blocks_per_rank, warp_of_block());
    if (number < 0 || is_aborted(joint.ranks[place.index])) return;
    typename J::Fabric fabric(joint.fabric, args.rank);
    run_dispatch_role(joint.ranks[place.index], bulk_buffers(), fabric, args, joint.roles,
                      number / warps, number % warps);
}

template <class T, bool kWeighted, class F>
__device__ __forceinline__ void run_combine_role(const DeviceRank& rank, BulkBuffers& buffers,
                                                 F& fabric, const CombineArgs& args,
                                                 const CombineRoles& roles, int channel, int role) {
    auto warp = [&](Role name) { return DeviceWarp(rank, args.call, name, channel, buffers); };
    const int other_nodes = roles.nodes - 1;
    auto other_node = [&](int i) { return i + (i >= args.node()); };
    if (role == 0) {
        DeviceWarp w = warp(Role::CombineReceiver);
        combine_receiver<T>(w, fabric, args, channel);
    } else if ((role -= 1) < roles.servers) {
        DeviceWarp w = warp(Role::CombineNvlSender);
        const int share = roles.ranks_per_server();
        combine_nvl_sender<T, kWeighted>(w, fabric, args, channel, role * share, share);
    } else if ((role -= roles.servers) < other_nodes) {
        DeviceWarp w = warp(Role::CombineForwarder);
        combine_forwarder<T>(w, fabric, args, channel, other_node(role));
    } else if ((role -= other_nodes) < roles.coordinators()) {
        DeviceWarp w = warp(Role::SenderCoordinator);
        sender_coordinator(w, fabric, args, RailCounts{args.layout, args.node(), true}, channel,
                           32 * role);
    } else {
        DeviceWarp w = warp(Role::ForwarderCoordinator);
        forwarder_coordinator(w, fabric, args, RailCounts{args.layout, args.node(), true}, channel,
                              32 * (role - roles.coordinators()));
    }
}

template <class T, bool kWeighted, class J>
__global__ void __launch_bounds__(kBlockThreads, 1)
    combine_kernel(const __grid_constant__ J joint) {
    const Place<J> place(joint);
    const CombineArgs& args = joint.args[place.index];
    const int warps = joint.roles.warps();
    const int number = role_of_warp(warps * args.layout.channels, place.block,
                                    joint.blocks_per_rank, warp_of_block());
    if (number < 0 || is_aborted(joint.ranks[place.index])) return;
    if (!has_layout(joint, place, args)) return;
    typename J::Fabric fabric(joint.fabric, args.rank);
    run_combine_role<T, kWeighted>(joint.ranks[place.index], bulk_buffers(), fabric, args,
                                   joint.roles, number / warps, number % warps);
}

}  // namespace ep::kernels
