#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>

namespace ep {

// A pool that keeps the memory of large outputs when they are freed. The system would map fresh
// pages for every call, and clearing them takes several times as long as moving rows. Thread-safe.
class MemoryPool {
  public:
    static MemoryPool& instance();

    // Returns at least `bytes` bytes, not cleared, aligned to a page. Throws std::bad_alloc.
    void* allocate(size_t bytes);
    void release(void* block);
    // Returns all unused blocks to the system.
    void trim();

  private:
    // Returns spare blocks to the system until at most `bytes` bytes are spare. Keeps blocks that
    // were freed during the last `recent` allocations.
    void shrink(size_t bytes, uint64_t recent);

    std::mutex mutex_;
    struct Block {
        void* data;
        size_t bytes;
        uint64_t freed = 0;  // the number of allocations at that time
    };
    std::map<void*, size_t> live_;
    std::list<Block> spare_;  // in the order in which they were freed
    size_t live_bytes_ = 0, spare_bytes_ = 0, peak_bytes_ = 0;
    uint64_t allocations_ = 0;
};

}  // namespace ep
