// GPU memory for symmetric heaps, which processes map from each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

namespace ep {

// Whether kernels on a GPU have native atomics on a peer's memory, which give_up needs.
bool has_native_atomics(int device, int peer);

// How another process maps memory: by CUDA IPC; or, if it is CUDA virtual memory, by a file
// descriptor within the host, or by a fabric handle from any host of the NVLink domain.
enum class MemoryKind { Ipc, Descriptor, Fabric };

// A driver's handle as bytes, and back. Throws std::invalid_argument for another number of bytes.
template <class T>
std::string bytes_of(const T& handle) {
    return std::string(reinterpret_cast<const char*>(&handle), sizeof(T));
}
template <class T>
T handle_of(const std::string& bytes) {
    if (bytes.size() != sizeof(T))
        throw std::invalid_argument("handle has " + std::to_string(bytes.size()) +
                                    " bytes, must have " + std::to_string(sizeof(T)));
    T handle;
    std::memcpy(&handle, bytes.data(), sizeof(T));
    return handle;
}

// Memory of a GPU for the symmetric heap of one rank, which other processes may map through its
// handle.
class DeviceMemory {
  public:
    // Returns zeroed memory. group: names the processes that may map it. Throws std::runtime_error
    // if the driver lacks this kind, or refuses it.
    static std::unique_ptr<DeviceMemory> create(int device, size_t bytes, const std::string& group,
                                                MemoryKind kind);
    // Maps memory that another process created, on any GPU that this one reaches. Throws
    // std::runtime_error if it does not reach it.
    static std::unique_ptr<DeviceMemory> open(int device, const std::string& handle, size_t bytes,
                                              MemoryKind kind);
    virtual ~DeviceMemory() = default;

    // Maps the memory of another process in place of that of one that has ended: pointers into it
    // stay valid, also in CUDA graphs. Throws std::runtime_error if that fails.
    virtual void replace(const std::string& handle) = 0;
    // Frees own memory, which nothing may map any more, or unmaps another's. May be called twice.
    virtual void release() = 0;
    // Frees what destroyed objects of this one's group, of any size, have left on its GPU.
    virtual void release_left() const {}
    // Returns what `open` needs in another process. Of kind Descriptor: the bytes of an int, a new
    // descriptor, which the caller closes.
    virtual std::string handle() = 0;

    // Zeros it. Called when no rank writes to it any more, and before any does again.
    void clear();
    int device() const { return device_; }
    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    bool is_released() const { return !data_; }

  protected:
    DeviceMemory(int device, char* data, size_t bytes)
        : device_(device), data_(data), bytes_(bytes) {}
    DeviceMemory(const DeviceMemory&) = delete;

    int device_;
    char* data_;
    size_t bytes_;
};

// Show whether kernels reach the memory of a peer: the first adds one to its first 8 bytes, by a
// kernel's system-wide atomic on the GPU that mapped them, and waits for it; the second returns
// them. Throw std::runtime_error if the GPU cannot.
void add_one(const DeviceMemory& memory);
uint64_t first_word(const DeviceMemory& memory);

}  // namespace ep
