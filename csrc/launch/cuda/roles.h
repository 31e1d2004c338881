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

// How many warps of a channel do what:
//   self_warps  this rank's own tokens: dispatch's sender, combine's receivers
//   peer_warps  rings to and from the other ranks: dispatch's receivers, combine's NVLink senders
//   rdma_warps  other nodes, so many of each of kPerNode kinds: RDMA senders (dispatch), forwarders
//   coordinators() of each of their two kinds
// A rank's blocks get equal shares of the warps of all channels, in the order of the channels.
template <int kPerNode>
struct ChannelRoles {
    static constexpr int kKindsPerNode = kPerNode;

    int nodes;
    int world;
    int peer_warps;
    int rdma_warps;
    int self_warps = 1;

    // Of either kind.
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

// The launch of notify: some of its warps exchange counts, the others number rows meanwhile.
// `roles`: of the exchange. Blocks for a warp more than channels, and, as far as there are SMs, for
// a warp of the exchange for each role.
EP_HD int notify_blocks(int channels, int roles, int sms) {
    const int warps = channels + 1 > 2 * roles ? channels + 1 : 2 * roles;
    const int blocks = ceil_div(warps, kBlockWarps);
    return blocks < sms ? blocks : sms;
}
EP_HD int notify_exchangers(int warps, int roles) {
    const int half = (warps + 1) / 2;
    return roles < half ? roles : half;
}

// The role, among `count` divided evenly over blocks, of this block's warp; -1: none.
EP_HD int role_of_warp(int count, int block, int blocks, int warp) {
    const int number = block * count / blocks + warp;
    return number < (block + 1) * count / blocks ? number : -1;
}

}  // namespace ep
