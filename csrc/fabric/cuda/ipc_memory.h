// GPU memory that processes of a machine map by CUDA IPC.
#pragma once

#include <memory>
#include <string>

#include "fabric/cuda/device_memory.h"

namespace ep {

// Memory that others may have mapped is not freed but kept for the next heap of its size and group:
// others write to it until they are done, and only members of the group are known to be done when
// the next heap is made.
class IpcMemory : public DeviceMemory {
  public:
    // The caller has made the device current.
    static std::unique_ptr<IpcMemory> create(int device, size_t bytes, const std::string& group);
    static std::unique_ptr<IpcMemory> open(int device, const std::string& handle, size_t bytes);
    ~IpcMemory() override;

    // Throws std::runtime_error also if the driver maps it elsewhere; then nothing is mapped any
    // more.
    void replace(const std::string& handle) override;
    void release() override;
    void release_left() const override;
    std::string handle() override;

  private:
    IpcMemory(int device, char* data, size_t bytes, const std::string& group, bool is_mapped)
        : DeviceMemory(device, data, bytes), group_(group), is_mapped_(is_mapped) {}

    std::string group_;
    bool is_mapped_;  // belongs to another process
    bool is_shared_ = false;
};

}  // namespace ep
