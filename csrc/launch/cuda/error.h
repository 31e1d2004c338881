#pragma once

#include <cuda_runtime.h>

#include <new>
#include <stdexcept>
#include <string>

namespace ep {

inline void check_cuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // an error that is not sticky is over with this exception
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// The calling thread uses this device until the end of the scope. cudaSetDevice creates a context on a device that has none, hundreds of megabytes,
// so it is called only for another device than the current one: who makes a GPU current before, as a process with a GPU of its own does, has a context
// there alone. Whoever did not gets the device back that was current, for it is where what is done next would go.
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
