#pragma once

#include <cstddef>
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
    void shrink(size_t bytes);

    std::mutex mutex_;
    struct Block {
        void* data;
        size_t bytes;
    };
    std::map<void*, size_t> live_;
    std::list<Block> spare_;  // the longest unused first
    size_t live_bytes_ = 0, spare_bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace ep
