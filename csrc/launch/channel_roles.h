#pragma once

#include "core/function.h"
#include "core/topology.h"

// How the warps of a launch are divided among channels and roles, on GPUs and in the simulation.
namespace ep {

constexpr int kBlockThreads = 512;
constexpr int kBlockWarps = kBlockThreads / 32;

EP_HD int ceil_div(int count, int share) { return (count + share - 1) / share; }

// Returns the least number of warps for which the busiest one serves as few of `count` rings as
// with `most` warps: more would be idle.
EP_HD int even_warps(int count, int most) {
    return count && most ? ceil_div(count, ceil_div(count, most)) : 0;
}

// How a channel's warps are divided among the roles:
//   self_warps  this rank's own tokens: dispatch's sender, combine's receivers
//   peer_warps  rings to and from the other ranks: dispatch's receivers, combine's NVLink senders
//   rdma_warps  other nodes, per kind (of kPerNode): RDMA senders (dispatch only) and forwarders
//   coordinators()  for each of the two kinds, sender and forwarder coordinators
// A rank's blocks get equal shares of the warps of all channels, ordered by channel.
template <int kPerNode>
struct ChannelRoles {
    static constexpr int kKindsPerNode = kPerNode;

    int nodes;
    int world;
    int peer_warps;
    int rdma_warps;
    int self_warps = 1;

    // A coordinator has a lane for each node.
    EP_HD int coordinators() const { return nodes > 1 ? ceil_div(nodes, 32) : 0; }
    EP_HD int ranks_per_peer_warp() const {
        return peer_warps ? ceil_div(world - 1, peer_warps) : 0;
    }
    EP_HD int nodes_per_rdma_warp() const {
        return rdma_warps ? ceil_div(nodes - 1, rdma_warps) : 0;
    }
    EP_HD int warps() const {
        return self_warps + peer_warps + kPerNode * rdma_warps + 2 * coordinators();
    }
};

// sender, receivers, senders and forwarders of other nodes, coordinators
using DispatchRoles = ChannelRoles<2>;
// receivers, senders, forwarders of other nodes, coordinators
using CombineRoles = ChannelRoles<1>;

// An RDMA warp has a lane for each of its nodes; a peer warp polls the rings of any number of
// ranks.
EP_HD int min_rdma_warps(const Topology& topology) { return ceil_div(topology.nodes - 1, 32); }
EP_HD int min_peer_warps(const Topology& topology) { return topology.world() > 1; }

// Divides a channel's `warps`. Each RDMA kind gets a warp for each other node, but at most an equal
// share of the warps. Of the rest, two fifths become self_warps (up to max_self_warps) and the
// others peer_warps; peer_warps that would be idle become self_warps. fits() is false if other
// ranks exist and no peer warp is left.
template <class Roles>
EP_HD Roles roles_for(const Topology& topology, int warps, int max_self_warps = 1) {
    const int others = topology.nodes - 1, min_warps = min_rdma_warps(topology);
    Roles roles{topology.nodes, topology.world(), 0, 0};
    const int share = (warps - roles.warps()) / (Roles::kKindsPerNode + 1);
    roles.rdma_warps = even_warps(others, share > min_warps ? share : min_warps);
    const int left = warps - roles.warps() + roles.self_warps;
    const auto self_warps_among = [&](int share) {
        return share < 1 ? 1 : share < max_self_warps ? share : max_self_warps;
    };
    const int self_warps = self_warps_among((2 * left + 2) / 5);
    roles.peer_warps = left > self_warps ? even_warps(topology.world() - 1, left - self_warps) : 0;
    roles.self_warps = self_warps_among(left - roles.peer_warps);
    return roles;
}

template <class Roles>
EP_HD bool fits(const Roles& roles, int warps) {
    return roles.warps() <= warps && (roles.peer_warps || roles.world == 1);
}

// Returns the blocks of notify's launch, in which at most half of the warps exchange counts while
// the others number rows. There are enough for channels + 1 warps, and for one exchanging warp for
// each of the exchange's `roles`, as far as there are SMs.
EP_HD int notify_blocks(int channels, int roles, int sms) {
    const int warps = channels + 1 > 2 * roles ? channels + 1 : 2 * roles;
    const int blocks = ceil_div(warps, kBlockWarps);
    return blocks < sms ? blocks : sms;
}
EP_HD int notify_exchangers(int warps, int roles) {
    const int half = (warps + 1) / 2;
    return roles < half ? roles : half;
}

// Returns this warp's role if `count` roles are divided evenly over the blocks; -1: none.
EP_HD int role_of_warp(int count, int block, int blocks, int warp) {
    const int number = block * count / blocks + warp;
    return number < (block + 1) * count / blocks ? number : -1;
}

}  // namespace ep
