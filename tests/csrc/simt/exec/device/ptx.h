#pragma once

#include "../../../half.h"
#include "exec/host/rows.h"
#include "order.h"
#include "simt.h"

// What csrc/exec/device/ptx.h promises, on the host.
namespace ep::ptx {

using simt::order::Scope;

inline void delay(const void*, uint64_t) {}

inline uint64_t load_acquire_gpu(const uint64_t* address) {
    return simt::order::acquire(address, Scope::Gpu);
}
inline uint64_t load_acquire_sys(const uint64_t* address) {
    return simt::order::acquire(address, Scope::System);
}
inline void store_release_gpu(uint64_t* address, uint64_t value) {
    simt::order::release(address, value, Scope::Gpu);
}
inline void store_release_sys(uint64_t* address, uint64_t value) {
    simt::order::release(address, value, Scope::System);
}
inline void store_relaxed_gpu(uint64_t* address, uint64_t value) {
    simt::order::relaxed(address, value, Scope::Gpu);
}
inline void store_relaxed_sys(uint64_t* address, uint64_t value) {
    simt::order::relaxed(address, value, Scope::System);
}
inline void wait_for_previous_launch() {}
inline void launch_dependents() { simt::launch_dependents(); }
inline uint64_t fetch_add_shared(uint64_t* address, uint64_t value) {
    return simt::order::fetch_add_relaxed(address, value);
}
inline uint64_t fetch_add_acq_rel_gpu(uint64_t* address, uint64_t value) {
    return simt::order::fetch_add_acq_rel(address, value, Scope::Gpu);
}
inline uint64_t fetch_add_sys(uint64_t* address, uint64_t value) {
    return simt::order::fetch_add_relaxed(address, value);
}
inline void compare_and_swap_release_sys(uint64_t* address, uint64_t expected, uint64_t value) {
    simt::order::compare_and_swap_release(address, expected, value, Scope::System);
    simt::yield();  // what the others find now must hold already
}
inline void compare_and_swap_release_gpu(uint64_t* address, uint64_t expected, uint64_t value) {
    simt::order::compare_and_swap_release(address, expected, value, Scope::Gpu);
}
void deliver_lines();  // some of those under way
inline uint64_t load_relaxed_sys(const uint64_t* address) {
    simt::may_wait_for_others();
    deliver_lines();  // one may be waited for by its tag alone
    return simt::order::load_relaxed(address);
}
inline void add_sys(uint64_t* address, uint64_t value) {
    simt::order::fetch_add_relaxed(address, value);
}

inline void add_gpu(int32_t* address, int32_t value) { *address += value; }

inline void max_gpu(uint64_t* address, uint64_t value) {
    const uint64_t before = simt::order::load_relaxed(address);
    if (before < value) simt::order::fetch_add_relaxed(address, value - before);
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
inline void store_shared(void* address, uint2 value) {
    if (reinterpret_cast<uintptr_t>(address) % 8) simt::die("an 8-byte access is not aligned");
    std::memcpy(address, &value, sizeof(value));
}
inline void store_shared(float* address, float value) { *address = value; }
inline void store_shared(double* address, double value) { *address = value; }
inline void store_streaming(uint4* address, uint4 value) { store(address, value); }

// ---- lines (lines.cpp)

uint4 load_line(const char* address);
void store_line(char* address, uint4 value);
void end_of_lines();  // after a launch: all have arrived

inline uint16_t narrow_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t pack_bf16(float low, float high) {
    return narrow_bf16(low) | static_cast<uint32_t>(narrow_bf16(high)) << 16;
}
inline uint32_t pack_fp16(float low, float high) {
    auto narrow = [](float value) -> uint32_t {
        return std::bit_cast<uint16_t>(static_cast<Half>(value));
    };
    return narrow(low) | narrow(high) << 16;
}
inline uint16_t pack_e4m3(float low, float high) {
    return static_cast<uint16_t>(to_e4m3(low) | to_e4m3(high) << 8);
}
inline uint16_t pack_e5m2(float low, float high) {
    return static_cast<uint16_t>(e5m2_of(low) | e5m2_of(high) << 8);
}
inline uint32_t unpack_e4m3(uint16_t pair) {
    return pack_fp16(value_of_e4m3(static_cast<uint8_t>(pair)),
                     value_of_e4m3(static_cast<uint8_t>(pair >> 8)));
}
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
    return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline float widen_fp16(uint16_t bits) { return static_cast<float>(std::bit_cast<Half>(bits)); }

// ---- the copy engine (copy_engine.cpp)

void barrier_init(uint64_t* barrier, uint32_t arrivals);
void fence_barrier_init();
void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes);
bool barrier_try_wait(uint64_t* barrier, uint32_t parity);
inline void fence_proxy_async_global() { simt::order::fence(simt::order::Fence::AsyncGlobal); }
inline void fence_proxy_async_shared() { simt::order::fence(simt::order::Fence::AsyncShared); }

void load_by_engine(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);
void store_by_engine(void* global, const void* shared, uint32_t bytes);
void wait_read_by_engine(size_t groups);
template <bool>
void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    load_by_engine(shared, global, bytes, barrier);
}
template <bool>
void bulk_store(void* global, const void* shared, uint32_t bytes) {
    store_by_engine(global, shared, bytes);
}
template <int kGroups>
void bulk_wait_read() {
    wait_read_by_engine(kGroups);
}
void bulk_commit();
void bulk_wait_written();

// After a launch: a kernel that ends before its stores are written loses them.
void end_of_launch();

}  // namespace ep::ptx
