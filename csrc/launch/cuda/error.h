#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace ep {

inline void check_cuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // an error that is not sticky is over with this exception
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// The calling thread uses this device until the end of the scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
        check_cuda(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceGuard() { cudaSetDevice(before_); }
    DeviceGuard(const DeviceGuard&) = delete;

  private:
    int before_;
};

}  // namespace ep
