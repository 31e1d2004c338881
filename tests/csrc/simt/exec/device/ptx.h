#pragma once

#include "simt.h"

// What csrc/exec/device/ptx.h promises, on the host.
namespace ep::ptx {

inline uint64_t load_acquire_gpu(const uint64_t* address) { return *address; }
inline uint64_t load_acquire_sys(const uint64_t* address) { return *address; }
inline void store_release_gpu(uint64_t* address, uint64_t value) { *address = value; }
inline void store_release_sys(uint64_t* address, uint64_t value) { *address = value; }
inline void store_relaxed_gpu(uint64_t* address, uint64_t value) { *address = value; }
inline void store_relaxed_sys(uint64_t* address, uint64_t value) { *address = value; }
inline uint64_t fetch_add_acq_rel_gpu(uint64_t* address, uint64_t value) {
    return std::exchange(*address, *address + value);
}
inline uint64_t fetch_add_sys(uint64_t* address, uint64_t value) {
    return std::exchange(*address, *address + value);
}
inline void compare_and_swap_sys(uint64_t* address, uint64_t expected, uint64_t value) {
    if (*address == expected) *address = value;
}

inline uint64_t globaltimer() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline void require_aligned(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16) simt::die("a 16-byte access is not aligned");
}
inline uint4 load_no_allocate(const uint4* address) {
    require_aligned(address);
    return *address;
}
inline void store(uint4* address, uint4 value) {
    require_aligned(address);
    *address = value;
}
inline uint4 load_shared(const void* address) {
    return load_no_allocate(static_cast<const uint4*>(address));
}
inline float load_shared(const float* address) { return *address; }
inline double load_shared(const double* address) { return *address; }
inline void store_shared(float* address, float value) { *address = value; }
inline void store_shared(double* address, double value) { *address = value; }
inline void store_streaming(uint4* address, uint4 value) { store(address, value); }

inline uint16_t narrow_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t pack_bf16(float low, float high) {
    return narrow_bf16(low) | static_cast<uint32_t>(narrow_bf16(high)) << 16;
}
inline uint32_t pack_fp16(float low, float high) {
    auto narrow = [](float value) -> uint32_t {
        return std::bit_cast<uint16_t>(static_cast<_Float16>(value));
    };
    return narrow(low) | narrow(high) << 16;
}
inline float widen_fp16(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }

// ---- the copy engine

struct Load {
    void* shared;
    const void* global;
    uint32_t bytes;
};
struct Barrier {
    uint32_t arrivals = 0, left = 0, phase = 0;
    int64_t bytes = 0;
    int polls = 0;            // of an arrived barrier that misses bytes
    std::vector<Load> loads;  // under way: they happen when somebody asks
};
struct Store {
    void* global;
    const void* shared;
    std::vector<char> read;  // what was in shared memory when it was read
};
using Group = std::vector<Store>;
struct Lane {
    Group open;
    std::vector<Group> committed;  // not written yet
    size_t read = 0;               // of these, how many have read their source
};

inline std::map<uint64_t*, Barrier>& barriers() {
    static std::map<uint64_t*, Barrier> all;
    return all;
}
inline std::map<std::pair<unsigned, unsigned>, Lane>& lanes() {
    static std::map<std::pair<unsigned, unsigned>, Lane> all;
    return all;
}
inline Lane& lane() { return lanes()[{simt::block_index().x, simt::thread_index().x}]; }

// After a launch: a kernel that ends before its stores are written loses them.
inline void end_of_launch() {
    for (const auto& [_, lane] : lanes()) {
        for (const Group& group : lane.committed) {
            if (!group.empty()) simt::die("a kernel ended before a bulk store was written");
        }
    }
    lanes().clear();
    barriers().clear();
}

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    barriers()[barrier] = {arrivals, arrivals};
}
inline void fence_barrier_init() {}
inline void fence_proxy_async_global() {}
inline void fence_proxy_async_shared() {}
inline void barrier_arrive_expect(uint64_t* address, uint32_t bytes) {
    Barrier& barrier = barriers()[address];
    if (barrier.left == 0) simt::die("more arrivals at a barrier than it expects");
    --barrier.left;
    barrier.bytes += bytes;
}
inline bool barrier_try_wait(uint64_t* address, uint32_t parity) {
    Barrier& barrier = barriers()[address];
    if (barrier.phase % 2 == parity) {
        for (const Load& load : barrier.loads) {
            std::memcpy(load.shared, load.global, load.bytes);
            barrier.bytes -= load.bytes;
        }
        barrier.loads.clear();
        if (barrier.left == 0 && barrier.bytes == 0) {
            ++barrier.phase;
            barrier.left = barrier.arrivals;
            barrier.polls = 0;
        } else {
            if (barrier.left == 0 && ++barrier.polls > 100'000)
                simt::die("a barrier expects other bytes than come");
            simt::yield();  // another lane has not yet said what to expect, or what to load
        }
    }
    return barrier.phase % 2 != parity;
}
// The engine reads as early as it may or as late.
inline bool reads_at_once() {
    static std::minstd_rand coin;
    return coin() % 2;
}
template <bool>
void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    require_aligned(shared);
    require_aligned(global);
    if (bytes % 16) simt::die("a bulk copy of a size that is no multiple of 16");
    if (reads_at_once()) {
        std::memcpy(shared, global, bytes);
        barriers()[barrier].bytes -= bytes;
    } else {
        barriers()[barrier].loads.push_back({shared, global, bytes});
    }
}
template <bool>
void bulk_store(void* global, const void* shared, uint32_t bytes) {
    require_aligned(shared);
    require_aligned(global);
    if (bytes % 16) simt::die("a bulk copy of a size that is no multiple of 16");
    lane().open.push_back({global, shared, std::vector<char>(bytes)});
}
inline void bulk_commit() { lane().committed.push_back(std::exchange(lane().open, {})); }

template <int kGroups>
void bulk_wait_read() {
    Lane& own = lane();
    for (; own.read + kGroups < own.committed.size(); ++own.read) {
        for (Store& store : own.committed[own.read])
            std::memcpy(store.read.data(), store.shared, store.read.size());
    }
}
inline void bulk_wait_written() {
    bulk_wait_read<0>();
    Lane& own = lane();
    for (const Group& group : own.committed) {
        for (const Store& store : group)
            std::memcpy(store.global, store.read.data(), store.read.size());
    }
    own.committed.clear();
    own.read = 0;
}

}  // namespace ep::ptx
