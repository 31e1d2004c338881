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

// The calling thread uses this device until the end of the scope. cudaSetDevice creates a context
// on a device that has none, hundreds of megabytes, so it is called only for another device than
// the current one. The way back must be taken all the same: what the thread does next would go to
// the wrong GPU. A buffer's set-up therefore makes its GPU current with torch, which goes back only
// when the other one is used.
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
