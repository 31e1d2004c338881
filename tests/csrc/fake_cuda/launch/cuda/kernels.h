#pragma once

#include "launch/cuda/joint.h"
#include "launch/cuda/roles.h"

// Nothing runs: names for what is launched.
namespace ep {

struct BulkBuffers {};

namespace kernels {

template <class J>
void notify_kernel(J) {}
template <class J>
void dispatch_kernel(J) {}
template <class J>
void fused_dispatch_kernel(J) {}
template <class J>
void own_rows_kernel(J) {}
template <class J>
void intra_rank_permute_kernel(J) {}

}  // namespace kernels
}  // namespace ep
