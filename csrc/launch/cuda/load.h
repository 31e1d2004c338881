#pragma once

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"
#include "launch/cuda/kernels.h"

namespace ep {

constexpr size_t kSharedBytes = kBlockWarps * sizeof(BulkBuffers);  // of a block

// CUDA loads a kernel when it is first asked for, and may wait then for what runs on the GPU: a
// first launch behind a kernel that waits for other ranks would hold up its host. So what
// launches kernels loads all of them when it is made.
template <class Kernel>
void load(Kernel kernel) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "cudaFuncSetAttribute");
}

}  // namespace ep
