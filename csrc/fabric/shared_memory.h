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
    // POSIX shared memory that never has a name for longer than it takes to make it, so that no
    // killed process leaves it behind: others open it through this process's file descriptor. Its
    // memory is reserved here, so that a full /dev/shm is an error now and not a SIGBUS later.
    static Segment shared(size_t bytes);
    static Segment open(const SegmentAddress& address, size_t bytes);

    Segment(Segment&& other) noexcept;
    Segment(const Segment&) = delete;
    ~Segment();

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    // Of a segment that was made by shared() and not yet closed to others.
    SegmentAddress address() const;
    // Everyone who needs it has opened it.
    void close_to_others();

  private:
    Segment(size_t bytes, int flags, int descriptor);

    char* data_;
    size_t bytes_;
    int descriptor_;
};

}  // namespace ep
