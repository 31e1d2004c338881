#pragma once

namespace ep {

// A deferred release of something on a GPU.
struct DeferredRelease {
    int device;
    void (*release)(void*);
    void* what;
};

// A destructor may run in a finalizer, at any moment and while any thread captures a CUDA graph,
// which most CUDA calls would end. So no destructor calls CUDA: a later call that may wait for the
// GPU runs the release.
void defer(const DeferredRelease& release) noexcept;

// Runs all deferred releases, after it has waited for their GPUs: kernels may still use them.
void run_deferred();

}  // namespace ep
