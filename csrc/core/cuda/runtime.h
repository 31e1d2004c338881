// Helpers for the CUDA runtime: errors become exceptions, and a guard sets the current device.
#pragma once

#include <cuda_runtime.h>

#include <new>
#include <stdexcept>
#include <string>

namespace ep {

inline void check_cuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears an error that is not sticky
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline void synchronize_device() { check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

inline void copy_async(void* to, const void* from, size_t bytes, void* stream) {
    check_cuda(
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
        "cudaMemcpyAsync");
}
inline void synchronize(void* stream) {
    check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
}

// Returns the address on the current GPU of host memory that is mapped for it.
template <class T>
T* on_gpu(T* mapped) {
    void* address = nullptr;
    check_cuda(cudaHostGetDevicePointer(&address, mapped, 0), "cudaHostGetDevicePointer");
    return static_cast<T*>(address);
}

// Makes a device current for the calling thread until the end of the scope. cudaSetDevice creates a
// context of hundreds of megabytes on a device that has none, so it is called only to switch
// devices. The destructor must switch back all the same, or later work of the thread would go to
// the wrong GPU. A buffer's set-up therefore makes its GPU current with torch, which switches back
// only when the other device is used.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) { check_cuda(enter(device), "cudaSetDevice"); }
    DeviceGuard(int device, std::nothrow_t) noexcept { enter(device); }  // for destructors
    ~DeviceGuard() {
        if (before_ != kUnchanged) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;

  private:
    static constexpr int kUnchanged = -1;

    cudaError_t enter(int device) noexcept {
        int current = kUnchanged;
        cudaError_t error = cudaGetDevice(&current);
        if (error != cudaSuccess || current == device) return error;
        error = cudaSetDevice(device);
        if (error == cudaSuccess) before_ = current;
        return error;
    }

    int before_ = kUnchanged;
};

}  // namespace ep
