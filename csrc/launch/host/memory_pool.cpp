#include "launch/host/memory_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>

namespace ep {

MemoryPool& MemoryPool::instance() {
    static MemoryPool* pool = new MemoryPool;  // outlives every tensor
    return *pool;
}

void* MemoryPool::allocate(size_t bytes) {
    // Sizes are rounded up, by an eighth or a page at most, so that similar ones can share a block.
    const size_t step = std::max<size_t>(4096, std::bit_floor(bytes) / 8);
    const size_t size = (bytes + step - 1) / step * step;
    const std::lock_guard lock(mutex_);
    ++allocations_;
    auto best = spare_.end();
    for (auto spare = spare_.begin(); spare != spare_.end(); ++spare) {
        const bool fits = spare->bytes >= size && spare->bytes <= 2 * size;
        if (fits && (best == spare_.end() || spare->bytes < best->bytes)) best = spare;
    }
    Block block{nullptr, size};
    if (best != spare_.end()) {
        block = *best;
        spare_bytes_ -= block.bytes;
        spare_.erase(best);
    } else {
        block.data =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block.data == MAP_FAILED) throw std::bad_alloc();
    }
    live_[block.data] = block.bytes;
    live_bytes_ += block.bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    return block.data;
}

void MemoryPool::release(void* block) {
    const std::lock_guard lock(mutex_);
    const auto live = live_.find(block);
    spare_.push_back({block, live->second, allocations_});
    spare_bytes_ += live->second;
    live_bytes_ -= live->second;
    live_.erase(live);
    // The pool keeps no more than was in use at the peak. Recent blocks stay in any case, for calls
    // that alternate between outputs of different sizes.
    constexpr uint64_t kRecent = 32;
    shrink(peak_bytes_, kRecent);
}

void MemoryPool::trim() {
    const std::lock_guard lock(mutex_);
    shrink(0, 0);
    peak_bytes_ = live_bytes_;
}

void MemoryPool::shrink(size_t bytes, uint64_t recent) {
    while (spare_bytes_ > bytes && spare_.front().freed + recent <= allocations_) {
        munmap(spare_.front().data, spare_.front().bytes);
        spare_bytes_ -= spare_.front().bytes;
        spare_.pop_front();
    }
}

}  // namespace ep
