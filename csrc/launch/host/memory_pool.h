#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>

namespace ep {

// Memory for large outputs that is kept when they are freed. The system would hand out fresh pages
// for every call, and clearing those takes several times as long as moving the rows. Thread-safe.
class MemoryPool {
  public:
    static MemoryPool& instance();

    // At least `bytes` bytes, not cleared, aligned to a page. Throws std::bad_alloc.
    void* allocate(size_t bytes);
    void release(void* block);
    // Gives back to the system what nobody uses.
    void trim();

  private:
    // Gives spare blocks back until so many bytes are left, but for those that were used in the
    // last so many allocations.
    void shrink(size_t bytes, uint64_t recent);

    std::mutex mutex_;
    struct Block {
        void* data;
        size_t bytes;
        uint64_t freed = 0;  // after so many allocations
    };
    std::map<void*, size_t> live_;
    std::list<Block> spare_;  // the longest unused first
    size_t live_bytes_ = 0, spare_bytes_ = 0, peak_bytes_ = 0;
    uint64_t allocations_ = 0;
};

}  // namespace ep
