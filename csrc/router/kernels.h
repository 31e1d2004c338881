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

// Divides a warp's part of shared memory into the arrays of a row's scratch. All element types have
// 4 or 8 bytes, so taking the wide ones first keeps every array aligned.
class ScratchArrays {
  public:
    __device__ explicit ScratchArrays(unsigned char* memory) : memory_(memory) {}

    template <class T>
    __device__ T* take(int count) {
        T* const array = reinterpret_cast<T*>(memory_);
        memory_ += count * sizeof(T);
        return array;
    }

  private:
    unsigned char* memory_;
};

// One warp per row. bytes_per_warp: of shared memory, see `forward_bytes` and `backward_bytes`.

template <class Storage>
__global__ void __launch_bounds__(kMaxThreads)
    router_forward(const RouterConfig config, const RouterForward args, const int bytes_per_warp) {
    using R = Real<Storage>;
    extern __shared__ __align__(16) unsigned char memory[];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= args.tokens) return;
    ScratchArrays arrays(memory + threadIdx.y * bytes_per_warp);
    ForwardScratch<R> scratch;
    scratch.score = arrays.take<R>(config.experts);
    scratch.key = arrays.take<Key<R>>(config.experts);
    scratch.group_key = arrays.take<Key<R>>(config.groups);
    scratch.weight = arrays.take<R>(kMaxTopk);
    scratch.id = arrays.take<int32_t>(kMaxTopk);
    WarpTeam team{static_cast<int>(threadIdx.x)};
    forward_row<Storage>(team, config, args, row, scratch);
}

template <class R>
size_t forward_bytes(const RouterConfig& config) {
    const size_t wide = 2 * size_t(config.experts) + config.groups + kMaxTopk;  // reals and keys
    return align_up(wide * sizeof(R) + kMaxTopk * sizeof(int32_t), 16);
}

template <class Storage>
__global__ void __launch_bounds__(kMaxThreads)
    router_backward(const RouterConfig config, const RouterBackward args,
                    const int bytes_per_warp) {
    using R = Real<Storage>;
    extern __shared__ __align__(16) unsigned char memory[];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= args.tokens) return;
    ScratchArrays arrays(memory + threadIdx.y * bytes_per_warp);
    BackwardScratch<R> scratch;
    scratch.score = arrays.take<R>(config.experts);
    scratch.grad = arrays.take<R>(config.experts);
    scratch.choice_score = arrays.take<R>(kMaxTopk);
    scratch.choice_grad = arrays.take<R>(kMaxTopk);
    scratch.id = arrays.take<int32_t>(kMaxTopk);
    WarpTeam team{static_cast<int>(threadIdx.x)};
    backward_row<Storage>(team, config, args, row, scratch);
}

template <class R>
size_t backward_bytes(const RouterConfig& config) {
    const size_t wide = 2 * size_t(config.experts) + 2 * kMaxTopk;  // reals
    return align_up(wide * sizeof(R) + kMaxTopk * sizeof(int32_t), 16);
}

}  // namespace ep::router
