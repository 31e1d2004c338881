#pragma once

#include "core/args.h"
#include "exec/device/device_rank.h"
#include "launch/cuda/roles.h"

namespace ep {

// A launch for all ranks of this process together, as kernel parameters: they travel with the launch, so a captured graph keeps them.
constexpr int kMaxJointRanks = 16;
constexpr int kBlockThreads = 512;
constexpr int kBlockWarps = kBlockThreads / 32;

struct NoRoles {};

template <class F, class Args, class Roles>
struct Joint {
    using Fabric = F;

    typename F::Params fabric;
    Roles roles;
    int blocks_per_rank;
    Args args[kMaxJointRanks];
    DeviceRank ranks[kMaxJointRanks];
    uint64_t* epochs[kMaxJointRanks];
};

template <class F>
using NotifyJoint = Joint<F, NotifyArgs, NoRoles>;
template <class F>
using DispatchJoint = Joint<F, DispatchArgs, DispatchRoles>;
template <class F>
using CombineJoint = Joint<F, CombineArgs, CombineRoles>;

}  // namespace ep
