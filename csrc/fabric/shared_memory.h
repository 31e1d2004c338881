#pragma once

#include <sys/types.h>

#include <cstddef>

namespace ep {

// Where another process of this machine finds a segment. The inode tells a wrong file from the
// right one.
struct SegmentAddress {
    pid_t process;
    int descriptor;
    dev_t device;
    ino_t inode;
};

// Zeroed memory of one process, or of several processes of a machine. Unmapped when destroyed.
class Segment {
  public:
    static Segment anonymous(size_t bytes);
    // Of more than the machine may have: only what is touched takes memory.
    static Segment sparse(size_t bytes);
    // POSIX shared memory that never has a name for longer than it takes to make it, so that no
    // killed process leaves it behind: others open it through this process's file descriptor. Its
    // memory is reserved here, so that a full /dev/shm is an error now and not a SIGBUS later.
    static Segment shared(size_t bytes);
    static Segment open(const SegmentAddress& address, size_t bytes);
    // Another segment of the same size in this one's place: pointers into it stay good.
    void replace(const SegmentAddress& address);

    // Unmaps it now: nobody may use it any more. Twice is fine.
    void release();

    Segment(Segment&& other) noexcept;
    Segment(const Segment&) = delete;
    ~Segment();

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    // Of a segment that was made by shared().
    SegmentAddress address() const;

  private:
    Segment(size_t bytes, int flags, int descriptor);
    void close_descriptor();

    char* data_;
    size_t bytes_;
    int descriptor_;
};

}  // namespace ep
