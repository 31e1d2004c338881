#pragma once

#include <cstddef>
#include <string>

namespace ep {

// Whether kernels on a GPU have native atomics on the memory of another one: give_up needs them.
bool has_native_atomics(int device, int peer);

// Zeroed memory of a GPU that holds the symmetric heap of one rank; another process of the machine
// may map it through its handle. Memory that others may have mapped is not freed but kept for the
// next heap of its size and group: they write to it until they are done themselves, and only
// members of the group are known to be done when the next heap is made.
class DeviceMemory {
  public:
    // group: names the processes that may map it.
    static DeviceMemory create(int device, size_t bytes, const std::string& group);
    // Maps memory that another process created, on any GPU that this one reaches. Throws
    // std::runtime_error when it does not.
    static DeviceMemory open(int device, const std::string& handle, size_t bytes);
    // The memory of another process in the place of that of one that has ended: pointers into it
    // stay good, those in CUDA graphs, too. Throws std::runtime_error when the driver puts it
    // elsewhere; then nothing is there any more.
    void replace(const std::string& handle);

    // Gives it back now, or unmaps it: own memory once nobody maps it any more. Twice is fine.
    void release();
    // Likewise what destroyed ones of this one's group, of any size, have left on its GPU.
    void release_left() const;

    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&&) = delete;
    ~DeviceMemory();

    // Once nobody writes to it any more, and before anybody does again.
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
