#pragma once

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"
#include "launch/cuda/kernels.h"

namespace ep {

// Dynamic shared memory of a block on the current GPU: code without the copy engine uses none.
inline size_t shared_bytes() {
    int device = 0, major = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
               "cudaDeviceGetAttribute");
    return major < 9 ? 0 : kBlockWarps * sizeof(BulkBuffers);
}

// Loads a kernel. CUDA would do so at its first use, and may then wait for the GPU: a first launch
// after a kernel that waits for other ranks would block the host. So constructors of objects that
// launch kernels load all of them.
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
