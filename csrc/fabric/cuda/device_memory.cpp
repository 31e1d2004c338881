#include "fabric/cuda/device_memory.h"

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"
#include "fabric/cuda/ipc_memory.h"
#include "fabric/cuda/virtual_memory.h"

namespace ep {

bool has_native_atomics(int device, int peer) {
    int supported = 0;
    check_cuda(
        cudaDeviceGetP2PAttribute(&supported, cudaDevP2PAttrNativeAtomicSupported, device, peer),
        "cudaDeviceGetP2PAttribute");
    return supported != 0;
}

std::unique_ptr<DeviceMemory> DeviceMemory::create(int device, size_t bytes,
                                                   const std::string& group, MemoryKind kind) {
    const DeviceGuard guard(device);
    std::unique_ptr<DeviceMemory> memory;
    if (kind == MemoryKind::Ipc) {
        memory = IpcMemory::create(device, bytes, group);
    } else {
        memory = VirtualMemory::create(device, bytes, kind);
    }
    memory->clear();
    return memory;
}

std::unique_ptr<DeviceMemory> DeviceMemory::open(int device, const std::string& handle,
                                                 size_t bytes, MemoryKind kind) {
    const DeviceGuard guard(device);
    if (kind == MemoryKind::Ipc) return IpcMemory::open(device, handle, bytes);
    return VirtualMemory::open(device, handle, bytes, kind);
}

void DeviceMemory::clear() {
    const DeviceGuard guard(device_);
    check_cuda(cudaMemset(data_, 0, bytes_), "cudaMemset");
    synchronize_device();
}

}  // namespace ep
