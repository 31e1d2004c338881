#pragma once

#include <cstddef>
#include <memory>

namespace ep {

// How something of a GPU is given back, whatever device is current.
struct GiveBack {
    int device;
    void (*give_back)(void*);

    void operator()(void* what) const;
};

// What is allocated one by one in a constructor goes back when a later step throws, too.
template <class T>
using Owned = std::unique_ptr<T, GiveBack>;

// Each throws std::runtime_error when there is none.
Owned<void> device_memory(int device, size_t bytes);
Owned<void> pinned_memory(int device, size_t bytes);  // of the host, where all devices reach it
Owned<void> side_stream(int device);                  // a cudaStream_t that is not held up by kernels of others

template <class T>
Owned<T[]> as_array(Owned<void> memory) {
    const GiveBack give_back = memory.get_deleter();
    return {static_cast<T*>(memory.release()), give_back};
}

}  // namespace ep
