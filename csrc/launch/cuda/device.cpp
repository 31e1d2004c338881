#include <cuda_runtime.h>

#include "core/cuda/runtime.h"
#include "launch/cuda/group.h"

namespace ep {

CudaDevice CudaDevice::of(int device) {
    CudaDevice gpu{};
    auto read = [device](int* value, cudaDeviceAttr attribute) {
        check_cuda(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
    };
    read(&gpu.sms, cudaDevAttrMultiProcessorCount);
    read(&gpu.major, cudaDevAttrComputeCapabilityMajor);
    read(&gpu.minor, cudaDevAttrComputeCapabilityMinor);
    return gpu;
}

}  // namespace ep
