#pragma once

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"
#include "launch/cuda/kernels.h"

namespace ep {

// Of a block on the current GPU: code for one without a copy engine uses none.
inline size_t shared_bytes() {
    int device = 0, major = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
               "cudaDeviceGetAttribute");
    return major < 9 ? 0 : kBlockWarps * sizeof(BulkBuffers);
}

// CUDA loads a kernel when it is first asked for, and may wait then for what runs on the GPU: a
// first launch behind a kernel that waits for other ranks would hold up its host. So what
// launches kernels loads all of them when it is made.
template <class Kernel>
cudaFuncAttributes load(Kernel kernel) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes())),
               "cudaFuncSetAttribute");
    return attributes;
}

}  // namespace ep
