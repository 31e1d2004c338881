#include "fabric/cuda/device_memory.h"

#include <cuda_runtime.h>

#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "core/cuda/deferred_release.h"
#include "core/cuda/runtime.h"

namespace ep {
namespace {

using Kind = std::tuple<int, size_t, std::string>;  // device, size, group

std::multimap<Kind, char*>& spare() {
    static std::multimap<Kind, char*> memories;
    return memories;
}

}  // namespace

bool has_native_atomics(int device, int peer) {
    int supported = 0;
    check_cuda(
        cudaDeviceGetP2PAttribute(&supported, cudaDevP2PAttrNativeAtomicSupported, device, peer),
        "cudaDeviceGetP2PAttribute");
    return supported != 0;
}

DeviceMemory DeviceMemory::create(int device, size_t bytes, const std::string& group) {
    const DeviceGuard guard(device);
    void* data = nullptr;
    const auto found = spare().find({device, bytes, group});
    const bool is_shared = found != spare().end();
    if (is_shared) {
        data = found->second;
        spare().erase(found);
    } else {
        check_cuda(cudaMalloc(&data, bytes),
                   ("allocating " + std::to_string(bytes) + " bytes of symmetric heap").c_str());
    }
    DeviceMemory memory(device, static_cast<char*>(data), bytes, group, false);
    memory.is_shared_ = is_shared;
    memory.clear();
    return memory;
}

void DeviceMemory::clear() {
    const DeviceGuard guard(device_);
    check_cuda(cudaMemset(data_, 0, bytes_), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

DeviceMemory DeviceMemory::open(int device, const std::string& handle, size_t bytes) {
    const DeviceGuard guard(device);
    cudaIpcMemHandle_t ipc;
    if (handle.size() != sizeof(ipc))
        throw std::invalid_argument("handle has " + std::to_string(handle.size()) +
                                    " bytes, must have " + std::to_string(sizeof(ipc)));
    std::memcpy(&ipc, handle.data(), sizeof(ipc));
    void* data = nullptr;
    check_cuda(cudaIpcOpenMemHandle(&data, ipc, cudaIpcMemLazyEnablePeerAccess),
               "mapping another rank's symmetric heap by CUDA IPC (its GPU must be a peer of this "
               "one: see nvidia-smi "
               "topo -p2p r)");
    return DeviceMemory(device, static_cast<char*>(data), bytes, "", true);
}

void DeviceMemory::replace(const std::string& handle) {
    const DeviceGuard guard(device_);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    char* const place = std::exchange(data_, nullptr);
    check_cuda(cudaIpcCloseMemHandle(place), "cudaIpcCloseMemHandle");
    // The driver takes the first range that is free and large enough: mostly the one just left.
    DeviceMemory other = open(device_, handle, bytes_);
    if (other.data_ != place) {
        throw std::runtime_error(
            "the driver maps another rank's symmetric heap elsewhere than its former one: build a "
            "new buffer");
    }
    data_ = std::exchange(other.data_, nullptr);
}

void DeviceMemory::release() {
    if (!data_) return;
    const DeviceGuard guard(device_);
    char* const data = std::exchange(data_, nullptr);
    if (is_mapped_) {
        check_cuda(cudaIpcCloseMemHandle(data), "cudaIpcCloseMemHandle");
    } else {
        check_cuda(cudaFree(data), "cudaFree");
    }
}

void DeviceMemory::release_left() const {
    const DeviceGuard guard(device_);
    std::erase_if(spare(), [&](const auto& left) {
        const auto& [device, bytes, group] = left.first;
        if (device != device_ || group != group_) return false;
        check_cuda(cudaFree(left.second), "cudaFree");
        return true;
    });
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      group_(std::move(other.group_)),
      is_mapped_(other.is_mapped_),
      is_shared_(other.is_shared_) {}

DeviceMemory::~DeviceMemory() {
    if (!data_) return;
    if (is_shared_) {
        spare().emplace(Kind(device_, bytes_, group_), data_);
        return;
    }
    defer({device_,
           is_mapped_ ? [](void* data) { cudaIpcCloseMemHandle(data); }
                      : [](void* data) { cudaFree(data); },
           data_});
}

std::string DeviceMemory::handle() {
    const DeviceGuard guard(device_);
    cudaIpcMemHandle_t ipc;
    check_cuda(cudaIpcGetMemHandle(&ipc, data_), "cudaIpcGetMemHandle");
    is_shared_ = true;
    return std::string(reinterpret_cast<const char*>(&ipc), sizeof(ipc));
}

}  // namespace ep
