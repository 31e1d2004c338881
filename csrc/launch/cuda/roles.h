#pragma once

#include "core/function.h"
#include "core/topology.h"

namespace ep {

EP_HD int ceil_div(int count, int share) { return (count + share - 1) / share; }

// Which warp does what. In each channel `servers` warps share the rings towards the other ranks
// (dispatch's receivers, combine's NVLink senders), and the rest have a role of their own. The
// roles of all channels, channel after channel, are divided among a rank's blocks in equal parts.
template <int kPerNode>
struct ChannelRoles {
    int nodes;
    int world;
    int servers;

    // Of either kind.
    EP_HD int coordinators() const { return nodes > 1 ? ceil_div(nodes, 32) : 0; }
    EP_HD int ranks_per_server() const { return servers ? ceil_div(world - 1, servers) : 0; }
    EP_HD int others() const { return 1 + kPerNode * (nodes - 1) + 2 * coordinators(); }
    EP_HD int warps() const { return servers + others(); }
};

// sender, receivers, (sender, forwarder) of each other node, coordinators
using DispatchRoles = ChannelRoles<2>;
// receiver, senders, forwarder of each other node, coordinators
using CombineRoles = ChannelRoles<1>;

// A server has a lane for each rank that it serves.
EP_HD int fewest_servers(const Topology& topology) { return ceil_div(topology.world() - 1, 32); }

// The least number of servers, at most `most`, for which the busiest one has as few ranks as with
// `most`: more of them would be idle.
EP_HD int even_servers(const Topology& topology, int most) {
    const int ranks = topology.world() - 1;
    return ranks && most ? ceil_div(ranks, ceil_div(ranks, most)) : 0;
}

// Servers that `warps` a channel have room for. Less than fewest_servers: a channel does not fit.
template <class Roles>
EP_HD int servers_for(const Topology& topology, int warps) {
    const int left = warps - Roles{topology.nodes, topology.world(), 0}.others();
    return left < 0 ? left : even_servers(topology, left);
}

// Of `count` roles that are divided among blocks in equal parts, the one of a block's warp; -1:
// none is left for it.
EP_HD int role_of_warp(int count, int block, int blocks, int warp) {
    const int number = block * count / blocks + warp;
    return number < (block + 1) * count / blocks ? number : -1;
}

}  // namespace ep
