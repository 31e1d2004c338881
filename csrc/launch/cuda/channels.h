#pragma once

#include <algorithm>

#include "core/args.h"
#include "launch/channel_roles.h"

namespace ep {

// Returns the number of channels that keeps all warps of `sms` SMs busy, or fewer if ranks of
// several nodes share a GPU, whose cache holds a limited number of rings. Works without a GPU.
inline int cuda_channels(const Topology& topology, int sms, int local_ranks) {
    // Each channel has one sender of this rank's tokens, so more channels help more than more warps
    // in each. But a channel needs enough receivers for its sender: a receiver writes a row once
    // for each of its experts, the sender once for each rank, and with several nodes the forwarders
    // send to the receivers, too.
    const int enough = topology.nodes > 1 ? std::min(3, topology.world() / 2)
                       : local_ranks > 1  ? 4
                                          : std::max(2, ceil_div(topology.world() - 1, 32));
    // The RDMA warps of each kind in a channel. A token goes to K nodes at most, so with many nodes
    // a warp for each would mostly idle, and the memory for rings grows with channels x nodes. With
    // six, 24 SMs have 16 channels for up to 64 nodes.
    constexpr int kEnoughRdmaWarps = 6;
    const int rdma_warps =
        std::max(min_rdma_warps(topology), std::min(topology.nodes - 1, kEnoughRdmaWarps));
    const int peer_warps = even_warps(topology.world() - 1, std::max(rdma_warps, enough));
    const DispatchRoles roles{topology.nodes, topology.world(), peer_warps, rdma_warps};
    const int channels = std::max(1, sms * kBlockWarps / roles.warps());
    if (topology.nodes == 1 || local_ranks == 1) return channels;
    // Ranks that share a GPU share its L2 cache. 1,200 rings of two rows of 14 KB are 34 MB of the
    // 50 MB of an H200. There is no such limit within one node, where fewer channels cost combine
    // more than they save dispatch.
    constexpr int kRingsInCache = 1200, kMinChannels = 8;
    const int rings = local_ranks * (topology.world() + topology.nodes - 1);
    return std::min(channels, std::max(kMinChannels, kRingsInCache / rings));
}

// Warps of combine's intra-rank pass that share the sums of one source rank and channel. With
// several nodes there are few channels, and one warp would hold up the exchange. Within one node
// there are more channels, and two warps would finish sums so long before the exchange reads them
// that they leave the cache.
inline int sum_warps(const Topology& topology) {
    return topology.nodes > 1 ? CombineArgs::kMaxSumWarps : 1;
}

}  // namespace ep
