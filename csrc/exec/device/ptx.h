#pragma once

#include <cstdint>

#include "core/function.h"

// PTX instructions, named by order and scope. They are compiler barriers where the order demands
// it.
namespace ep::ptx {

// ---- flags

// In a build whose MEGATRON_EP_DELAYS is a seed, and in no other: sleeps at this flag for a random
// time that depends on seed, thread, flag and value, so that roles meet in other orders.
EP_FN void delay([[maybe_unused]] const void* flag, [[maybe_unused]] uint64_t value) {
#if defined(MEGATRON_EP_DELAYS)
    constexpr uint32_t kMax = 8192;  // ns
    uint64_t hash = MEGATRON_EP_DELAYS;
    auto mix = [&](uint64_t word) {
        hash = (hash ^ word) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 32;
    };
    mix(reinterpret_cast<uint64_t>(flag));
    mix(value);
    mix(static_cast<uint64_t>(blockIdx.x) << 32 | threadIdx.x);
    if (hash % 4 == 0) __nanosleep(hash / 4 % kMax);
#endif
}

EP_FN uint64_t load_acquire_gpu(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    delay(address, value);
    return value;
}
EP_FN uint64_t load_acquire_sys(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    delay(address, value);
    return value;
}
EP_FN void store_release_gpu(uint64_t* address, uint64_t value) {
    delay(address, value);
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
EP_FN void store_release_sys(uint64_t* address, uint64_t value) {
    delay(address, value);
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
EP_FN void store_relaxed_gpu(uint64_t* address, uint64_t value) {
    delay(address, value);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
EP_FN void store_relaxed_sys(uint64_t* address, uint64_t value) {
    delay(address, value);
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// ---- atomics of system scope: only for failures and masked ranks

EP_FN uint64_t fetch_add_sys(uint64_t* address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(address), "l"(value)
                 : "memory");
    return before;
}
// A release: orders this thread's earlier writes before it.
EP_FN void compare_and_swap_release_sys(uint64_t* address, uint64_t expected, uint64_t value) {
    [[maybe_unused]] uint64_t before;
    asm volatile("atom.release.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(address), "l"(expected), "l"(value)
                 : "memory");
}

// ---- counters that others read, only for failures and statistics: nothing waits for them

EP_FN void add_sys(uint64_t* address, uint64_t value) {
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

EP_FN void max_gpu(uint64_t* address, uint64_t value) {
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

EP_FN uint64_t load_relaxed_sys(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// ---- counts of one warp, which does not wait for the addition

EP_FN void add_gpu(int32_t* address, int32_t value) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// ---- launches that begin before the previous one in their stream has ended

// Waits until the previous launch has ended and all that it wrote is visible.
EP_FN void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Called by one thread of every block: the next launch may begin, where this one leaves room.
EP_FN void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- atomics of GPU scope: for blocks of a launch that meet, and masked ranks

EP_FN uint64_t fetch_add_acq_rel_gpu(uint64_t* address, uint64_t value) {
    uint64_t before;
    delay(address, value);
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(address), "l"(value)
                 : "memory");
    return before;
}

// A release: an acquire of the word by this GPU sees what this thread wrote or acquired before.
EP_FN void compare_and_swap_release_gpu(uint64_t* address, uint64_t expected, uint64_t value) {
    [[maybe_unused]] uint64_t before;
    delay(address, value);
    asm volatile("atom.release.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(address), "l"(expected), "l"(value)
                 : "memory");
}

// ---- time

EP_FN uint64_t globaltimer() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// ---- rows: read once and written once, so the L1 cache keeps nothing of them. They do not take
// the read-only path: another SM may have written them during this launch.

EP_FN uint4 load_no_allocate(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}
EP_FN void store(uint4* address, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}
// Leaves the L2 cache first: it is not read again soon.
EP_FN void store_streaming(uint4* address, uint4 value) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// ---- lines: 16 bytes of one, whose other units the lane's neighbours load or store by the same
// instruction. Relaxed: the tag says whether the line is there

EP_FN uint4 load_line(const char* address) {
    ulonglong2 value;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(value.x), "=l"(value.y)
                 : "l"(address)
                 : "memory");
    return {static_cast<uint32_t>(value.x), static_cast<uint32_t>(value.x >> 32),
            static_cast<uint32_t>(value.y), static_cast<uint32_t>(value.y >> 32)};
}
EP_FN void store_line(char* address, uint4 value) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address),
                 "l"(static_cast<uint64_t>(value.y) << 32 | value.x),
                 "l"(static_cast<uint64_t>(value.w) << 32 | value.z)
                 : "memory");
}

// ---- number formats: round to nearest even

EP_FN uint32_t pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
EP_FN uint32_t pack_fp16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// Numbers larger than e4m3 has become its largest.
EP_FN uint16_t pack_e4m3(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
// The same for e5m2.
EP_FN uint16_t pack_e5m2(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
// Converts two e4m3 to two fp16, which has room for them all.
EP_FN uint32_t unpack_e4m3(uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
// NaN if either is.
EP_FN float max_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
// The maximum of each half.
EP_FN uint32_t max_u16x2(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
EP_FN float widen_fp16(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// ---- shared memory

EP_FN uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Adds to a word in the block's shared memory. Orders nothing.
EP_FN uint64_t fetch_add_shared(uint64_t* address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.relaxed.cta.shared::cta.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "r"(shared_address(address)), "l"(value)
                 : "memory");
    return before;
}

EP_FN uint4 load_shared(const void* address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(shared_address(address))
                 : "memory");
    return value;
}
EP_FN float load_shared(const float* address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared_address(address)) : "memory");
    return value;
}
EP_FN double load_shared(const double* address) {
    double value;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(shared_address(address)) : "memory");
    return value;
}
EP_FN void store_shared(void* address, uint2 value) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared_address(address)), "r"(value.x),
                 "r"(value.y)
                 : "memory");
}
EP_FN void store_shared(float* address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared_address(address)), "f"(value) : "memory");
}
EP_FN void store_shared(double* address, double value) {
    asm volatile("st.shared.f64 [%0], %1;" ::"r"(shared_address(address)), "d"(value) : "memory");
}

// ---- bulk copies through shared memory (sm_90): the SM's copy engine reads and writes in the
// async proxy

EP_FN void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
// Orders the initialization of barriers before the copies that arrive at them.
EP_FN void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders what this thread has acquired or written in global memory before bulk copies that it
// issues later, which might otherwise read what was there before.
EP_FN void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Orders this thread's accesses to shared memory before bulk copies into the same place that it, or
// another thread after a barrier, issues.
EP_FN void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

EP_FN void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}
EP_FN bool barrier_try_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}
// kStreaming: leaves the L2 cache first, here and below.
template <bool kStreaming>
EP_FN void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    if constexpr (kStreaming) {
        asm volatile(
            "{\n\t"
            ".reg .b64 policy;\n\t"
            "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1], %2, [%3], "
            "policy;\n\t"
            "}" ::"r"(shared_address(shared)),
            "l"(global), "r"(bytes), "r"(shared_address(barrier))
            : "memory");
        return;
    }
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
template <bool kStreaming>
EP_FN void bulk_store(void* global, const void* shared, uint32_t bytes) {
    if constexpr (kStreaming) {
        asm volatile(
            "{\n\t"
            ".reg .b64 policy;\n\t"
            "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
            "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, policy;\n\t"
            "}" ::"l"(global),
            "r"(shared_address(shared)), "r"(bytes)
            : "memory");
    } else {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                     "r"(shared_address(shared)), "r"(bytes)
                     : "memory");
    }
}
EP_FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the kGroups newest groups of this thread's bulk stores have read the source.
template <int kGroups>
EP_FN void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
// Waits until all bulk stores of this thread have been written.
EP_FN void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace ep::ptx
