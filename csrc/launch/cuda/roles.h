#pragma once

#include "core/function.h"

namespace ep {

// Which warp does what. Each channel has `warps()` roles, numbered from 0; the roles of all channels of a rank lie behind each other and
// are dealt to the warps of its blocks in this order, so that a channel's roles are mostly on one SM.
struct ChannelRoles {
    int nodes;
    int world;
    int servers;  // warps that share the rings towards all ranks: dispatch's receivers, combine's NVLink senders

    EP_HD int coordinators() const { return nodes > 1 ? (nodes + 31) / 32 : 0; }  // of either kind
    EP_HD int ranks_per_server() const { return (world + servers - 1) / servers; }
    EP_HD int least_servers() const { return (world + 31) / 32; }
};

// sender, receivers, (sender, forwarder) of each other node, coordinators
struct DispatchRoles : ChannelRoles {
    EP_HD int warps() const { return 1 + servers + 2 * (nodes - 1) + 2 * coordinators(); }
};

// receiver, senders, forwarder of each other node, coordinators
struct CombineRoles : ChannelRoles {
    EP_HD int warps() const { return 1 + servers + (nodes - 1) + 2 * coordinators(); }
};

}  // namespace ep
