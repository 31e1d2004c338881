#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "core/cuda/runtime.h"
#include "router/core/args.h"
#include "router/exec/device/warp_team.h"

namespace ep::router {

// The arrays of a row's scratch, one behind the other in a warp's part of shared memory. All
// element types have 4 or 8 bytes: who takes the wide ones first keeps every array aligned.
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

constexpr int kMaxWarps = 4;  // of a block
constexpr int kMaxThreads = 32 * kMaxWarps;

// Launches kernel(config, args, bytes_per_warp) with a warp per row.
template <class Args>
void launch_rows(void (*kernel)(RouterConfig, Args, int), const RouterConfig& config,
                 const Args& args, size_t bytes_per_warp, cudaStream_t stream) {
    constexpr size_t kWithoutOptIn = 48 * 1024;
    if (args.tokens == 0) return;
    int warps = kMaxWarps;
    while (warps > 1 && warps * bytes_per_warp > kWithoutOptIn) warps /= 2;
    const size_t shared = warps * bytes_per_warp;
    if (shared > kWithoutOptIn) {
        int device = 0, most = 0;
        check_cuda(cudaGetDevice(&device), "cudaGetDevice");
        check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                   "cudaDeviceGetAttribute");
        if (shared > static_cast<size_t>(most)) {
            throw std::invalid_argument("logits has " + std::to_string(config.experts) +
                                        " experts, which need " + std::to_string(shared) +
                                        " bytes of shared memory; this GPU has " +
                                        std::to_string(most));
        }
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared)),
                   "cudaFuncSetAttribute");
    }
    const int64_t blocks = (args.tokens + warps - 1) / warps;
    kernel<<<dim3(static_cast<unsigned>(blocks)), dim3(32, warps), shared, stream>>>(
        config, args, static_cast<int>(bytes_per_warp));
    check_cuda(cudaGetLastError(), "kernel launch");
}

}  // namespace ep::router
