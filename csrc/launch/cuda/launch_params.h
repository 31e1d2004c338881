#pragma once

#include "core/args.h"
#include "core/function.h"
#include "core/outputs.h"
#include "exec/device/device_rank.h"
#include "launch/channel_roles.h"

namespace ep {

struct NoRoles {};

// A rank's counters in the GPU's memory, each on a cache line that it shares with no other.
struct Progress {
    static constexpr int kWordsOfLine = 16, kWords = 4 * kWordsOfLine;
    uint64_t* words;

    EP_HD uint64_t& notifies() const { return words[0]; }
    EP_HD uint64_t* arrivals_of_notify() const { return words + kWordsOfLine; }
    EP_HD uint64_t* warps_at_end() const { return words + 2 * kWordsOfLine; }
    // Separate from arrivals_of_notify because `meet` divides by the launch's number of blocks.
    EP_HD uint64_t* arrivals_of_fused_dispatch() const { return words + 3 * kWordsOfLine; }
};

// The kernel parameter of a launch for all ranks of this process, at most kRanks. It holds all
// arguments by value, so that a captured graph keeps them. kRanks = 1 makes smaller parameters and
// lighter launches for the usual case. FabricParams names its device side `Fabric`.
template <class FabricParams, class Args, int kRanks, class Roles = NoRoles>
struct LaunchParams {
    using Fabric = typename FabricParams::Fabric;

    FabricParams fabric;
    Roles roles;
    int blocks_per_rank;
    // For dispatch and combine: no later launch of the call writes outputs.
    bool ends_call;
    Args args[kRanks];
    DeviceRank ranks[kRanks];
    Progress progress[kRanks];
};

template <class P, int kRanks>
using NotifyParams = LaunchParams<P, NotifyArgs, kRanks>;
template <class P, int kRanks>
using DispatchParams = LaunchParams<P, DispatchArgs, kRanks, DispatchRoles>;
template <class P, int kRanks>
using FusedDispatchParams = LaunchParams<P, DispatchCallArgs, kRanks, DispatchRoles>;
template <class P, int kRanks>
using CombineParams = LaunchParams<P, CombineArgs, kRanks, CombineRoles>;

}  // namespace ep
