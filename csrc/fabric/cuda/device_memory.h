// GPU memory for symmetric heaps, mapped between processes by CUDA IPC.
#pragma once

#include <cstddef>
#include <string>

namespace ep {

// Whether kernels on a GPU have native atomics on a peer's memory, which give_up needs.
bool has_native_atomics(int device, int peer);

// Zeroed memory of a GPU for the symmetric heap of one rank. Another process of the machine may map
// it through its handle. Memory that others may have mapped is not freed but kept for the next heap
// of its size and group: others write to it until they are done, and only members of the group are
// known to be done when the next heap is made.
class DeviceMemory {
  public:
    // group: names the processes that may map it.
    static DeviceMemory create(int device, size_t bytes, const std::string& group);
    // Maps memory that another process created, on any GPU that this one reaches. Throws
    // std::runtime_error if it does not reach it.
    static DeviceMemory open(int device, const std::string& handle, size_t bytes);
    // Maps the memory of another process in place of that of one that has ended: pointers into it
    // stay valid, also in CUDA graphs. Throws std::runtime_error if the driver maps it elsewhere;
    // then nothing is mapped any more.
    void replace(const std::string& handle);

    // Frees own memory, which nothing may map any more, or unmaps another's. May be called twice.
    void release();
    // Frees what destroyed objects of this one's group, of any size, have left on its GPU.
    void release_left() const;

    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&&) = delete;
    ~DeviceMemory();

    // Zeros it. Called when no rank writes to it any more, and before any does again.
    void clear();
    std::string handle();
    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    bool is_released() const { return !data_; }

  private:
    DeviceMemory(int device, char* data, size_t bytes, const std::string& group, bool is_mapped)
        : device_(device), data_(data), bytes_(bytes), group_(group), is_mapped_(is_mapped) {}

    int device_;
    char* data_;
    size_t bytes_;
    std::string group_;
    bool is_mapped_;  // belongs to another process
    bool is_shared_ = false;
};

}  // namespace ep
