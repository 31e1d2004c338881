// GPU memory of CUDA's virtual memory interface, which has addresses apart from memory.
#pragma once

#include <memory>
#include <string>

#include "fabric/cuda/device_memory.h"

namespace ep {

// A range of addresses, and the memory of this or another process that is mapped there. The memory
// lives as long as any process maps it, so that its owner may free it while others still write.
class VirtualMemory : public DeviceMemory {
  public:
    // The caller has made the device current.
    static std::unique_ptr<VirtualMemory> create(int device, size_t bytes, MemoryKind kind);
    static std::unique_ptr<VirtualMemory> open(int device, const std::string& handle, size_t bytes,
                                               MemoryKind kind);
    ~VirtualMemory() override;

    // Always maps it at the same addresses. After an error nothing may be mapped there.
    void replace(const std::string& handle) override;
    void release() override;
    std::string handle() override;

  private:
    struct Mapping;

    VirtualMemory(int device, size_t bytes, MemoryKind kind, std::unique_ptr<Mapping> mapping);

    MemoryKind kind_;
    std::unique_ptr<Mapping> mapping_;
};

}  // namespace ep
