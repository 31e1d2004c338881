#pragma once

#include "core/function.h"
#include "core/topology.h"

namespace ep {

// Which warp does what. Each channel has `warps()` roles, numbered from 0; the roles of all channels of a rank lie behind each other and are
// dealt to the warps of its blocks in this order, so that a channel's roles are mostly on one SM.
struct ChannelRoles {
    int nodes;
    int world;
    int servers;  // warps that share the rings towards all ranks: dispatch's receivers, combine's NVLink senders

    EP_HD int coordinators() const { return nodes > 1 ? (nodes + 31) / 32 : 0; }  // of either kind
    EP_HD int ranks_per_server() const { return (world + servers - 1) / servers; }
};

// sender, receivers, (sender, forwarder) of each other node, coordinators
struct DispatchRoles : ChannelRoles {
    EP_HD int warps() const { return 1 + servers + 2 * (nodes - 1) + 2 * coordinators(); }
};

// receiver, senders, forwarder of each other node, coordinators
struct CombineRoles : ChannelRoles {
    EP_HD int warps() const { return 1 + servers + (nodes - 1) + 2 * coordinators(); }
};

// Servers that `warps` per channel leave room for: at most one a rank. Less than fewest_servers: a channel does not fit.
template <class Roles>
EP_HD int servers_for(const Topology& topology, int warps) {
    const int others = Roles{{topology.nodes, topology.world(), 0}}.warps();
    const int left = warps - others;
    return left < topology.world() ? left : topology.world();
}
EP_HD int fewest_servers(const Topology& topology) { return (topology.world() + 31) / 32; }  // a lane a rank

}  // namespace ep
