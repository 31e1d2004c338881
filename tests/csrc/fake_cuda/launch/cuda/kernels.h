#pragma once

#include "launch/channel_roles.h"
#include "launch/cuda/launch_params.h"

// Nothing runs: names for what is launched.
namespace ep {

struct BulkBuffers {};

namespace kernels {

template <class L>
void notify_kernel(L) {}
template <class L>
void dispatch_kernel(L) {}
template <class L>
void fused_dispatch_kernel(L) {}
template <class L>
void own_rows_kernel(L) {}
template <class L>
void intra_rank_permute_kernel(L) {}

}  // namespace kernels
}  // namespace ep
