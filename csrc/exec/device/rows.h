#pragma once

#include <cstddef>
#include <cstdint>

#include "exec/device/ptx.h"
#include "exec/warp.h"

// The loops that decide the GPU's bandwidth. All 32 lanes call each; pointers and sizes are the
// same in all lanes unless named own_*.
namespace ep::rows {

constexpr uint32_t kAllLanes = 0xffffffffu;

EP_FN int lane_id() { return threadIdx.x & 31; }

template <class T>
EP_FN T* shuffle_pointer(T* pointer, int lane) {
    return reinterpret_cast<T*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

// The bits below 16 that are set in the size or in an address that takes part.
EP_FN uint32_t misalignment(const void* own, uint32_t mask, const void* shared, size_t bytes) {
    const bool takes_part = mask >> lane_id() & 1;
    const auto bits = takes_part ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(own)) : 0u;
    return (__reduce_or_sync(kAllLanes, bits) |
            static_cast<uint32_t>(reinterpret_cast<uintptr_t>(shared)) | bytes) &
           15;
}

template <CacheHint hint>
EP_FN void store(uint4* address, uint4 value) {
    if constexpr (hint == CacheHint::EvictFirst) {
        ptx::store_streaming(address, value);
    } else {
        ptx::store(address, value);
    }
}

// Copies a row to the destination of each lane in the mask. Everything is aligned to 16 bytes.
template <CacheHint hint>
EP_FN void multicast_vectors(void* own_dst, uint32_t mask, const void* src, size_t bytes) {
    constexpr int kInFlight = 2;  // long rows go through shared memory
    const uint4* in = static_cast<const uint4*>(src);
    const uint32_t vectors = bytes / sizeof(uint4);
    for (uint32_t first = lane_id(); first - lane_id() < vectors; first += 32 * kInFlight) {
        uint4 values[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (first + 32 * i < vectors) values[i] = ptx::load_no_allocate(in + first + 32 * i);
        }
        for_each_lane(mask, [&](int lane) {
            uint4* out = static_cast<uint4*>(shuffle_pointer(own_dst, lane));
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (first + 32 * i < vectors) store<hint>(out + first + 32 * i, values[i]);
            }
        });
    }
}

template <class Unit>
EP_FN void copy_units(void* dst, const void* src, size_t bytes) {
    Unit* out = static_cast<Unit*>(dst);
    const Unit* in = static_cast<const Unit*>(src);
#pragma unroll 4
    for (size_t i = lane_id(); i < bytes / sizeof(Unit); i += 32) out[i] = in[i];
}

// Copies a row that is short or not aligned to 16 bytes, in the widest units that it allows.
__device__ __noinline__ inline void copy_in_units(void* dst, const void* src, size_t bytes) {
    const uint32_t bits = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(dst) |
                                                reinterpret_cast<uintptr_t>(src) | bytes);
    if (!(bits & 15)) return copy_units<uint4>(dst, src, bytes);
    if (!(bits & 3)) return copy_units<uint32_t>(dst, src, bytes);
    if (!(bits & 1)) return copy_units<uint16_t>(dst, src, bytes);
    copy_units<uint8_t>(dst, src, bytes);
}

// Sets every byte of the row.
template <uint8_t kByte>
EP_FN void fill(void* dst, size_t bytes) {
    constexpr uint32_t kWord = kByte * 0x01010101u;
    char* out = static_cast<char*>(dst);
    const size_t to_aligned = -reinterpret_cast<uintptr_t>(out) & 15;
    const size_t head = bytes < to_aligned ? bytes : to_aligned;
    const size_t body = (bytes - head) & ~size_t{15};
    for (size_t i = lane_id(); i < head; i += 32) out[i] = static_cast<char>(kByte);
    for (size_t i = head + lane_id() * 16; i < head + body; i += 32 * 16) {
        ptx::store_streaming(reinterpret_cast<uint4*>(out + i), uint4{kWord, kWord, kWord, kWord});
    }
    for (size_t i = head + body + lane_id(); i < bytes; i += 32) out[i] = static_cast<char>(kByte);
}

}  // namespace ep::rows
