#pragma once

#include <cstddef>
#include <memory>

namespace ep {

// CUDA's handles, for files that do not include CUDA's headers.
using CudaStream = void*;  // a cudaStream_t
using CudaEvent = void*;   // a cudaEvent_t

// A GPU's number of SMs and compute capability.
struct CudaDevice {
    int sms;
    int major;
    int minor;

    static CudaDevice of(int device);
};

// Releases a resource of a GPU later, whatever device is current: see core/cuda/deferred_release.h.
struct Release {
    int device;
    void (*release)(void*);

    void operator()(void* what) const;
};

// An owned resource of a GPU, which is released also if a later step of a constructor throws.
template <class T>
using Resource = std::unique_ptr<T, Release>;

// Each throws std::runtime_error if the allocation fails.
Resource<void> device_memory(int device, size_t bytes);
Resource<void> pinned_memory(int device, size_t bytes);  // host memory, mapped for all devices
Resource<void> side_stream(int device);  // a cudaStream_t that does not wait for the default stream
Resource<void> event(int device);        // a cudaEvent_t

template <class T>
Resource<T[]> as_array(Resource<void> memory) {
    const Release release = memory.get_deleter();
    return {static_cast<T*>(memory.release()), release};
}
template <class T>
Resource<T[]> device_array(int device, size_t count) {
    return as_array<T>(device_memory(device, count * sizeof(T)));
}
template <class T>
Resource<T[]> pinned_array(int device, size_t count) {
    return as_array<T>(pinned_memory(device, count * sizeof(T)));
}

}  // namespace ep
