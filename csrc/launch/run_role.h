#pragma once

#include "launch/channel_roles.h"
#include "protocol/combine_receiver.h"
#include "protocol/coordinators.h"
#include "protocol/dispatch.h"

namespace ep {

// Runs the role that warp `number` of a channel has. GPUs, the host and the simulation all use
// this. warp_of(role) returns the warp that runs the role.

template <bool kCombine, class WarpOf, class F>
EP_FN void run_coordinator(WarpOf&& warp_of, F& fabric, const TransferArgs& args, int coordinators,
                           int channel, int number) {
    const RailCounts counts{args.layout, args.node(), kCombine};
    if (number < coordinators) {
        auto warp = warp_of(Role::SenderCoordinator);
        sender_coordinator(warp, fabric, args, counts, channel, 32 * number);
    } else {
        auto warp = warp_of(Role::ForwarderCoordinator);
        forwarder_coordinator(warp, fabric, args, counts, channel, 32 * (number - coordinators));
    }
}

template <class WarpOf, class F>
EP_FN void run_dispatch_role(WarpOf&& warp_of, F& fabric, const DispatchArgs& args,
                             const DispatchRoles& roles, int channel, int number) {
    const int rdma_warps = roles.rdma_warps, nodes = roles.nodes_per_rdma_warp();
    if (number == 0) {
        auto warp = warp_of(Role::NvlSender);
        nvl_sender(warp, fabric, args, channel);
    } else if ((number -= 1) < roles.peer_warps) {
        auto warp = warp_of(Role::Receiver);
        const int share = roles.ranks_per_peer_warp();
        receiver(warp, fabric, args, channel, number * share, share);
    } else if ((number -= roles.peer_warps) < rdma_warps) {
        auto warp = warp_of(Role::RdmaSender);
        rdma_sender(warp, fabric, args, channel, number * nodes, nodes);
    } else if ((number -= rdma_warps) < rdma_warps) {
        auto warp = warp_of(Role::Forwarder);
        forwarder(warp, fabric, args, channel, number * nodes, nodes);
    } else {
        run_coordinator<false>(warp_of, fabric, args, roles.coordinators(), channel,
                               number - rdma_warps);
    }
}

template <class T, bool kWeighted, class WarpOf, class F>
EP_FN void run_combine_role(WarpOf&& warp_of, F& fabric, const CombineArgs& args,
                            const CombineRoles& roles, int channel, int number) {
    const int rdma_warps = roles.rdma_warps, nodes = roles.nodes_per_rdma_warp();
    if (number < roles.self_warps) {
        auto warp = warp_of(Role::CombineReceiver);
        combine_receiver<T, kWeighted>(warp, fabric, args, channel, number, roles.self_warps);
    } else if ((number -= roles.self_warps) < roles.peer_warps) {
        auto warp = warp_of(Role::CombineNvlSender);
        const int share = roles.ranks_per_peer_warp();
        combine_nvl_sender<T, kWeighted>(warp, fabric, args, channel, number * share, share);
    } else if ((number -= roles.peer_warps) < rdma_warps) {
        auto warp = warp_of(Role::CombineForwarder);
        combine_forwarder<T>(warp, fabric, args, channel, number * nodes, nodes);
    } else {
        run_coordinator<true>(warp_of, fabric, args, roles.coordinators(), channel,
                              number - rdma_warps);
    }
}

}  // namespace ep
