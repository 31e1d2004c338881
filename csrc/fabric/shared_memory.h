// Host memory for symmetric heaps, private or shared between processes.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <tuple>

namespace ep {

// How another process of this machine finds a segment: (process, descriptor, device, inode). The
// inode identifies the right file.
using SegmentAddress = std::tuple<pid_t, int, uint64_t, uint64_t>;

// Zeroed memory of one process, or shared by processes of a machine. Unmapped when destroyed.
class Segment {
  public:
    static Segment anonymous(size_t bytes);
    // May be larger than the machine's memory: only touched pages take memory.
    static Segment sparse(size_t bytes);
    // POSIX shared memory that has a name only while it is made, so that no killed process leaves
    // it behind: others open it through this process's file descriptor. Its memory is reserved
    // here, so that a full /dev/shm is an error now and not a SIGBUS later.
    static Segment shared(size_t bytes);
    static Segment open(const SegmentAddress& address, size_t bytes);
    // Maps another segment of the same size in place of this one: pointers into it stay valid.
    void replace(const SegmentAddress& address);

    // Unmaps it now. It must not be used any more. May be called twice.
    void release();

    Segment(Segment&& other) noexcept;
    Segment(const Segment&) = delete;
    ~Segment();

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    // Only for a segment made by shared().
    SegmentAddress address() const;

  private:
    Segment(size_t bytes, int flags, int descriptor);
    void close_descriptor();

    char* data_;
    size_t bytes_;
    int descriptor_;
};

}  // namespace ep
