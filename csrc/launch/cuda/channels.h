#pragma once

#include <algorithm>

#include "core/args.h"
#include "launch/cuda/roles.h"

namespace ep {

// Channels that keep all warps of `sms` SMs busy, or fewer where ranks of several nodes share a
// GPU, whose cache holds only so many rings. Asks no GPU.
inline int cuda_channels(const Topology& topology, int sms, int local_ranks) {
    // Rows of a channel pass through one sender, so channels are worth more than warps within one;
    // but a receiver writes a row to each of its experts where the sender writes it once, and with
    // several nodes more than one sender feeds it.
    const int enough = topology.nodes > 1 ? std::min(3, topology.world() / 2)
                       : local_ranks > 1  ? 4
                                          : std::max(2, ceil_div(topology.world() - 1, 32));
    // A token goes to K nodes at most, so with many of them warps of their own would idle; and the
    // memory for rings grows with channels times nodes. With six, 24 SMs have 16 channels up to 64
    // nodes.
    constexpr int kEnoughRdmaWarps = 6;
    const int rdma_warps =
        std::max(min_rdma_warps(topology), std::min(topology.nodes - 1, kEnoughRdmaWarps));
    const int peer_warps = even_warps(topology.world() - 1, std::max(rdma_warps, enough));
    const DispatchRoles roles{topology.nodes, topology.world(), peer_warps, rdma_warps};
    const int channels = std::max(1, sms * kBlockWarps / roles.warps());
    if (topology.nodes == 1 || local_ranks == 1) return channels;
    // Ranks that share a GPU share its cache, where about so many rings of two rows of 14 KB fit.
    // No such bound within one node: there combine, whose warps have a row of a token each, loses
    // more than dispatch gains.
    constexpr int kRingsInCache = 1200, kMinChannels = 8;
    const int rings = local_ranks * (topology.world() + topology.nodes - 1);
    return std::min(channels, std::max(kMinChannels, kRingsInCache / rings));
}

// Warps that share the sums of what arrived from a rank on a channel, in combine's local pass. With
// several nodes one would hold up all who wait for its sums. Within one node there are more
// channels, and sums that run far ahead of the exchange leave the cache before they are read.
inline int sum_warps(const Topology& topology) {
    return topology.nodes > 1 ? CombineArgs::kMaxSumWarps : 1;
}

}  // namespace ep
