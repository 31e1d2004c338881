// CUDA kernels of the router.
#pragma once

#include <cstddef>
#include <cstdint>

#include "router/router.h"
#include "router/rows.h"
#include "router/warp_team.h"

namespace ep::router {

constexpr int kMaxWarps = 4;  // per block
constexpr int kMaxThreads = 32 * kMaxWarps;

// One warp per row. bytes_per_warp: of shared memory, see scratch_bytes.

__device__ __forceinline__ int64_t row_of_warp() {
    return int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
}
template <class Scratch>
__device__ __forceinline__ Scratch scratch_of_warp(const RouterConfig& config, int bytes_per_warp) {
    extern __shared__ __align__(16) unsigned char memory[];
    ScratchArrays arrays(memory + threadIdx.y * bytes_per_warp);
    return Scratch::in(arrays, config);
}

template <class Storage>
__global__ void __launch_bounds__(kMaxThreads)
    router_forward(const RouterConfig config, const RouterForward args, const int bytes_per_warp) {
    if (row_of_warp() >= args.tokens) return;
    WarpTeam team{static_cast<int>(threadIdx.x)};
    forward_row<Storage>(team, config, args, row_of_warp(),
                         scratch_of_warp<ForwardScratch<Real<Storage>>>(config, bytes_per_warp));
}

template <class Storage>
__global__ void __launch_bounds__(kMaxThreads)
    router_backward(const RouterConfig config, const RouterBackward args,
                    const int bytes_per_warp) {
    if (row_of_warp() >= args.tokens) return;
    WarpTeam team{static_cast<int>(threadIdx.x)};
    backward_row<Storage>(team, config, args, row_of_warp(),
                          scratch_of_warp<BackwardScratch<Real<Storage>>>(config, bytes_per_warp));
}

}  // namespace ep::router
