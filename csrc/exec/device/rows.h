#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtypes.h"
#include "exec/device/ptx.h"
#include "exec/warp.h"

// The loops in which the GPU's bandwidth is won. All 32 lanes take part in each; pointers and sizes are the same in all lanes unless they
// are said to be a lane's own.
namespace ep::rows {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

template <class T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

// The bits below 16 that are set in the size or in an address that takes part.
__device__ __forceinline__ uint32_t misalignment(const void* own, uint32_t mask, const void* shared, size_t bytes) {
    const bool takes_part = mask >> lane_id() & 1;
    const auto bits = takes_part ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(own)) : 0u;
    return (__reduce_or_sync(kAllLanes, bits) | static_cast<uint32_t>(reinterpret_cast<uintptr_t>(shared)) | bytes) &
           15;
}

template <Reuse reuse>
__device__ __forceinline__ void store(uint4* address, uint4 value) {
    if constexpr (reuse == Reuse::Late) {
        ptx::store_streaming(address, value);
    } else {
        ptx::store(address, value);
    }
}

// Each lane's own destination in the mask gets the row. Everything aligned to 16 bytes.
template <Reuse reuse>
__device__ __forceinline__ void multicast_vectors(void* own_dst, uint32_t mask, const void* src, size_t bytes) {
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
                if (first + 32 * i < vectors) store<reuse>(out + first + 32 * i, values[i]);
            }
        });
    }
}

template <class Unit>
__device__ __forceinline__ void copy_units(void* dst, const void* src, size_t bytes) {
    Unit* out = static_cast<Unit*>(dst);
    const Unit* in = static_cast<const Unit*>(src);
#pragma unroll 4
    for (size_t i = lane_id(); i < bytes / sizeof(Unit); i += 32) out[i] = in[i];
}

// A row that is not aligned to 16 bytes, in the widest units that it allows.
__device__ __noinline__ inline void copy_misaligned(void* dst, const void* src, size_t bytes) {
    const uint32_t bits =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src) | bytes);
    if (!(bits & 3)) return copy_units<uint32_t>(dst, src, bytes);
    if (!(bits & 1)) return copy_units<uint16_t>(dst, src, bytes);
    copy_units<uint8_t>(dst, src, bytes);
}

__device__ __forceinline__ void zero(void* dst, size_t bytes) {
    char* out = static_cast<char*>(dst);
    const size_t to_aligned = -reinterpret_cast<uintptr_t>(out) & 15;
    const size_t head = bytes < to_aligned ? bytes : to_aligned;
    const size_t body = (bytes - head) & ~size_t{15};
    for (size_t i = lane_id(); i < head; i += 32) out[i] = 0;
    for (size_t i = head + lane_id() * 16; i < head + body; i += 32 * 16) {
        ptx::store_streaming(reinterpret_cast<uint4*>(out + i), uint4{});
    }
    for (size_t i = head + body + lane_id(); i < bytes; i += 32) out[i] = 0;
}

// ---- sums

__device__ __forceinline__ float widen(BFloat16 value) {
    return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ __forceinline__ float widen(Float16 value) { return ptx::widen_fp16(value.bits); }
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }

__device__ __forceinline__ void narrow(float value, BFloat16& out) {
    out.bits = static_cast<uint16_t>(ptx::pack_bf16(value, 0));
}
__device__ __forceinline__ void narrow(float value, Float16& out) {
    out.bits = static_cast<uint16_t>(ptx::pack_fp16(value, 0));
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }

// The 16 bytes of a vector as numbers.
template <class T>
struct Elements {
    static constexpr int kCount = sizeof(uint4) / sizeof(T);
    T values[kCount];
};

template <class T>
__device__ __forceinline__ uint4 narrow_vector(const decltype(widen(T{}))* sums) {
    Elements<T> elements;
    uint4 vector;
    static_assert(sizeof(elements) == sizeof(vector));
    if constexpr (sizeof(T) == 2) {  // two at a time
        auto pack = [&](int i) {
            if constexpr (__is_same(T, BFloat16)) return ptx::pack_bf16(sums[i], sums[i + 1]);
            return ptx::pack_fp16(sums[i], sums[i + 1]);
        };
        vector = {pack(0), pack(2), pack(4), pack(6)};
    } else {
#pragma unroll
        for (int i = 0; i < Elements<T>::kCount; ++i) narrow(sums[i], elements.values[i]);
        memcpy(&vector, &elements, sizeof(vector));
    }
    return vector;
}

template <class T>
__device__ __forceinline__ void accumulate(decltype(widen(T{}))* sums, const uint4& vector) {
    Elements<T> elements;
    memcpy(&elements, &vector, sizeof(vector));
#pragma unroll
    for (int i = 0; i < Elements<T>::kCount; ++i) sums[i] += widen(elements.values[i]);
}

// Sums start from -0, to which adding anything, -0 too, gives exactly that.
template <class T>
__device__ __forceinline__ void sum_vectors(void* dst, const void* own_src, uint32_t mask, uint32_t vectors) {
    using Sum = decltype(widen(T{}));
    constexpr int kRows = 4, kVectors = 1;  // in flight: long rows go through shared memory
    uint4* out = static_cast<uint4*>(dst);
    for (uint32_t first = lane_id(); first - lane_id() < vectors; first += 32 * kVectors) {
        Sum sums[kVectors][Elements<T>::kCount];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int i = 0; i < Elements<T>::kCount; ++i) sums[v][i] = -Sum{0};
        }
        for (uint32_t rest = mask; rest;) {
            uint4 values[kRows][kVectors];
            uint32_t taken = rest;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (!taken) break;
                const uint4* in = static_cast<const uint4*>(shuffle_pointer(own_src, lowest_lane(taken)));
                taken &= taken - 1;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    if (first + 32 * v < vectors) values[r][v] = ptx::load_no_allocate(in + first + 32 * v);
                }
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (!rest) break;
                rest &= rest - 1;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) accumulate<T>(sums[v], values[r][v]);
            }
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (first + 32 * v < vectors) ptx::store(out + first + 32 * v, narrow_vector<T>(sums[v]));
        }
    }
}

// One vector of the sum of `count` rows in shared memory that lie `stride` bytes apart.
template <class T>
__device__ __forceinline__ void sum_shared(void* dst, const char* first, uint32_t count, uint32_t stride) {
    decltype(widen(T{})) sums[Elements<T>::kCount];
#pragma unroll
    for (auto& sum : sums) sum = -decltype(widen(T{})){0};
#pragma unroll 4
    for (uint32_t row = 0; row < count; ++row) accumulate<T>(sums, ptx::load_shared(first + row * stride));
    ptx::store(static_cast<uint4*>(dst), narrow_vector<T>(sums));
}

// The same order of additions, an element at a time.
template <class T>
__device__ __noinline__ inline void sum_elements(void* dst, const void* own_src, uint32_t mask, size_t count) {
    T* out = static_cast<T*>(dst);
    for (size_t first = 0; first < count; first += 32) {
        const size_t i = first + lane_id();
        auto sum = -decltype(widen(T{})){0};
        for_each_lane(mask, [&](int lane) {
            const T* in = static_cast<const T*>(shuffle_pointer(own_src, lane));
            if (i < count) sum += widen(in[i]);
        });
        if (i < count) narrow(sum, out[i]);
    }
}

}  // namespace ep::rows
