#include "launch/cuda/resource.h"

#include <cuda_runtime.h>

#include "core/cuda/deferred_release.h"
#include "core/cuda/runtime.h"

namespace ep {

void Release::operator()(void* what) const { defer({device, release, what}); }

Resource<void> device_memory(int device, size_t bytes) {
    const DeviceGuard guard(device);
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, bytes), "cudaMalloc");
    return {data, {device, [](void* memory) { cudaFree(memory); }}};
}

Resource<void> pinned_memory(int device, size_t bytes) {
    const DeviceGuard guard(device);
    void* data = nullptr;
    check_cuda(cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
               "cudaHostAlloc");
    return {data, {device, [](void* memory) { cudaFreeHost(memory); }}};
}

Resource<void> side_stream(int device) {
    const DeviceGuard guard(device);
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return {stream, {device, [](void* it) { cudaStreamDestroy(static_cast<cudaStream_t>(it)); }}};
}

Resource<void> event(int device) {
    const DeviceGuard guard(device);
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return {event, {device, [](void* it) { cudaEventDestroy(static_cast<cudaEvent_t>(it)); }}};
}

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
