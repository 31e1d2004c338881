#include "fabric/cuda/ipc_memory.h"

#include <cuda_runtime.h>

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

char* map(const std::string& handle) {
    void* data = nullptr;
    check_cuda(cudaIpcOpenMemHandle(&data, handle_of<cudaIpcMemHandle_t>(handle),
                                    cudaIpcMemLazyEnablePeerAccess),
               "mapping another rank's symmetric heap by CUDA IPC (its GPU must be a peer of this "
               "one: see nvidia-smi "
               "topo -p2p r)");
    return static_cast<char*>(data);
}

}  // namespace

std::unique_ptr<IpcMemory> IpcMemory::create(int device, size_t bytes, const std::string& group) {
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
    std::unique_ptr<IpcMemory> memory(
        new IpcMemory(device, static_cast<char*>(data), bytes, group, false));
    memory->is_shared_ = is_shared;
    return memory;
}

std::unique_ptr<IpcMemory> IpcMemory::open(int device, const std::string& handle, size_t bytes) {
    return std::unique_ptr<IpcMemory>(new IpcMemory(device, map(handle), bytes, "", true));
}

void IpcMemory::replace(const std::string& handle) {
    const DeviceGuard guard(device_);
    synchronize_device();
    char* const place = std::exchange(data_, nullptr);
    check_cuda(cudaIpcCloseMemHandle(place), "cudaIpcCloseMemHandle");
    // The driver takes the first range that is free and large enough: mostly the one just left.
    char* const data = map(handle);
    if (data != place) {
        cudaIpcCloseMemHandle(data);
        throw std::runtime_error(
            "the driver maps another rank's symmetric heap elsewhere than its former one: build a "
            "new buffer");
    }
    data_ = data;
}

void IpcMemory::release() {
    if (!data_) return;
    const DeviceGuard guard(device_);
    char* const data = std::exchange(data_, nullptr);
    if (is_mapped_) {
        check_cuda(cudaIpcCloseMemHandle(data), "cudaIpcCloseMemHandle");
    } else {
        check_cuda(cudaFree(data), "cudaFree");
    }
}

void IpcMemory::release_left() const {
    const DeviceGuard guard(device_);
    std::erase_if(spare(), [&](const auto& left) {
        const auto& [device, bytes, group] = left.first;
        if (device != device_ || group != group_) return false;
        check_cuda(cudaFree(left.second), "cudaFree");
        return true;
    });
}

IpcMemory::~IpcMemory() {
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

std::string IpcMemory::handle() {
    const DeviceGuard guard(device_);
    cudaIpcMemHandle_t ipc;
    check_cuda(cudaIpcGetMemHandle(&ipc, data_), "cudaIpcGetMemHandle");
    is_shared_ = true;
    return bytes_of(ipc);
}

}  // namespace ep
