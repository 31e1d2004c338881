#pragma once

#include "core/function.h"
#include "core/topology.h"

namespace ep {

constexpr int kBlockThreads = 512;
constexpr int kBlockWarps = kBlockThreads / 32;

EP_HD int ceil_div(int count, int share) { return (count + share - 1) / share; }

// The least number of warps, at most `most`, for which the busiest one has as few of `count` rings
// as with `most`: more of them would be idle.
EP_HD int even_warps(int count, int most) {
    return count && most ? ceil_div(count, ceil_div(count, most)) : 0;
}

// Which warp does what. In each channel `owners` warps share the own tokens (dispatch's sender,
// combine's receivers), `servers` warps the rings towards the other ranks (dispatch's receivers,
// combine's NVLink senders), and of each of kPerNode kinds `carriers` warps the other nodes; the
// coordinators have a role of their own. The roles of all channels, channel after channel, are
// divided among a rank's blocks in equal parts.
template <int kPerNode>
struct ChannelRoles {
    static constexpr int kKindsPerNode = kPerNode;

    int nodes;
    int world;
    int servers;
    int carriers;
    int owners = 1;

    // Of either kind.
    EP_HD int coordinators() const { return nodes > 1 ? ceil_div(nodes, 32) : 0; }
    EP_HD int ranks_per_server() const { return servers ? ceil_div(world - 1, servers) : 0; }
    EP_HD int nodes_per_carrier() const { return carriers ? ceil_div(nodes - 1, carriers) : 0; }
    EP_HD int warps() const { return owners + servers + kPerNode * carriers + 2 * coordinators(); }
};

// sender, receivers, senders and forwarders of other nodes, coordinators
using DispatchRoles = ChannelRoles<2>;
// receivers, senders, forwarders of other nodes, coordinators
using CombineRoles = ChannelRoles<1>;

// A carrier has a lane for each of its nodes; a server serves any number of ranks.
EP_HD int fewest_carriers(const Topology& topology) { return ceil_div(topology.nodes - 1, 32); }
EP_HD int fewest_servers(const Topology& topology) { return topology.world() > 1; }

// The roles that `warps` a channel have room for: a warp for each other node where there are few,
// else servers and each kind of carriers share alike; of what is left for servers and owners two in
// five are owners, where there may be several, and those that servers have no use for. No servers
// though there are other ranks: a channel does not fit.
template <class Roles>
EP_HD Roles roles_for(const Topology& topology, int warps, int most_owners = 1) {
    const int others = topology.nodes - 1, fewest = fewest_carriers(topology);
    Roles roles{topology.nodes, topology.world(), 0, 0};
    const int share = (warps - roles.warps()) / (Roles::kKindsPerNode + 1);
    roles.carriers = even_warps(others, share > fewest ? share : fewest);
    const int left = warps - roles.warps() + roles.owners;
    const auto owners_among = [&](int share) {
        return share < 1 ? 1 : share < most_owners ? share : most_owners;
    };
    const int owners = owners_among((2 * left + 2) / 5);
    roles.servers = left > owners ? even_warps(topology.world() - 1, left - owners) : 0;
    roles.owners = owners_among(left - roles.servers);
    return roles;
}

template <class Roles>
EP_HD bool fits(const Roles& roles, int warps) {
    return roles.warps() <= warps && (roles.servers || roles.world == 1);
}

// Of `count` roles that are divided among blocks in equal parts, the one of a block's warp; -1:
// none is left for it.
EP_HD int role_of_warp(int count, int block, int blocks, int warp) {
    const int number = block * count / blocks + warp;
    return number < (block + 1) * count / blocks ? number : -1;
}

}  // namespace ep
