#pragma once

#include "core/args.h"
#include "exec/device/device_rank.h"
#include "launch/cuda/roles.h"

namespace ep {

constexpr int kMaxJointRanks = 32;
constexpr int kBlockThreads = 512;
constexpr int kBlockWarps = kBlockThreads / 32;

struct NoRoles {};

// A launch for all ranks of this process together. All of it is a kernel parameter: it travels with
// the launch, so a captured graph keeps it. FabricParams names its device side `Fabric`.
template <class FabricParams, class Args, class Roles = NoRoles>
struct Joint {
    using Fabric = typename FabricParams::Fabric;

    FabricParams fabric;
    Roles roles;
    int blocks_per_rank;
    Args args[kMaxJointRanks];
    DeviceRank ranks[kMaxJointRanks];
    uint64_t* epochs[kMaxJointRanks];  // notifies so far
};

template <class P>
using NotifyJoint = Joint<P, NotifyArgs>;
template <class P>
using DispatchJoint = Joint<P, DispatchArgs, DispatchRoles>;
template <class P>
using CombineJoint = Joint<P, CombineArgs, CombineRoles>;

}  // namespace ep
