#pragma once

#include "core/args.h"
#include "core/function.h"
#include "core/outputs.h"
#include "exec/device/device_rank.h"
#include "launch/cuda/roles.h"

namespace ep {

struct NoRoles {};

// What a rank counts on the GPU: words in memory of their own lines.
struct Progress {
    static constexpr int kWordsOfLine = 16, kWords = 4 * kWordsOfLine;
    uint64_t* words;

    EP_HD uint64_t& notifies() const { return words[0]; }
    EP_HD uint64_t* arrivals_of_notify() const { return words + kWordsOfLine; }
    EP_HD uint64_t* warps_at_end() const { return words + 2 * kWordsOfLine; }
    // Those of a launch that has another number of blocks: `meet` divides by it.
    EP_HD uint64_t* arrivals_of_fused_dispatch() const { return words + 3 * kWordsOfLine; }
};

// A launch for all ranks of this process together, at most kRanks. All of it is a kernel parameter:
// it travels with the launch, so a captured graph keeps it. A process with one rank has kernels of
// its own, whose launches are lighter. FabricParams names its device side `Fabric`.
template <class FabricParams, class Args, int kRanks, class Roles = NoRoles>
struct Joint {
    using Fabric = typename FabricParams::Fabric;

    FabricParams fabric;
    Roles roles;
    int blocks_per_rank;
    // Of a dispatch or combine: none of its launches behind this one writes outputs.
    bool ends_call;
    Args args[kRanks];
    DeviceRank ranks[kRanks];
    Progress progress[kRanks];
};

template <class P, int kRanks>
using NotifyJoint = Joint<P, NotifyArgs, kRanks>;
template <class P, int kRanks>
using DispatchJoint = Joint<P, DispatchArgs, kRanks, DispatchRoles>;
template <class P, int kRanks>
using FusedDispatchJoint = Joint<P, FusedDispatchArgs, kRanks, DispatchRoles>;
template <class P, int kRanks>
using CombineJoint = Joint<P, CombineArgs, kRanks, CombineRoles>;

}  // namespace ep
