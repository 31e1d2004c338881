#pragma once

namespace ep {

// How something of a GPU is given back.
struct PutOff {
    int device;
    void (*release)(void*);
    void* what;
};

// A destructor may run in a finalizer, at any moment and while any thread captures a CUDA graph,
// which most calls of CUDA would end. So no destructor calls CUDA: it leaves that to a later call
// that may wait for the GPU.
void put_off(const PutOff& release) noexcept;

// Waits for the GPUs of what was put off, which kernels may still use. They end by themselves.
void catch_up();

}  // namespace ep
