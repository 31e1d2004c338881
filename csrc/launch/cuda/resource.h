#pragma once

#include <cstddef>
#include <memory>

namespace ep {

// How something of a GPU is given back, whatever device is current: see core/cuda/put_off.h.
struct Release {
    int device;
    void (*release)(void*);

    void operator()(void* what) const;
};

// What is allocated one by one in a constructor goes back when a later step throws, too.
template <class T>
using Resource = std::unique_ptr<T, Release>;

// Each throws std::runtime_error when there is none.
Resource<void> device_memory(int device, size_t bytes);
Resource<void> pinned_memory(int device, size_t bytes);  // of the host, where all devices reach it
Resource<void> side_stream(int device);  // a cudaStream_t that is not held up by kernels of others
Resource<void> event(int device);        // a cudaEvent_t

template <class T>
Resource<T[]> as_array(Resource<void> memory) {
    const Release release = memory.get_deleter();
    return {static_cast<T*>(memory.release()), release};
}

}  // namespace ep
