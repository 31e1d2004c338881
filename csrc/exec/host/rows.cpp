#include "exec/host/rows.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// The same loop compiled for wider vectors too, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define EP_WIDE __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define EP_WIDE
#endif

namespace ep {
namespace {

constexpr size_t kBlock = 1024;  // elements summed at a time: the sums stay in the first-level cache

inline float widen(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// Round to nearest even; a NaN stays a (quiet) NaN.
inline void narrow(float value, BFloat16& out) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40;
    out.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

// IEEE half by way of fp32 arithmetic: scaling by a power of two moves the exponent's bias and handles subnormals.
inline float widen(Float16 value) {
    const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t special = (value.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | (value.bits & 0x8000u) << 16);
}

inline void narrow(float value, Float16& out) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    // adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t half = magnitude >= 0x477ff000u ? special : magnitude < 0x38800000u ? subnormal : normal;
    out.bits = static_cast<uint16_t>(half | sign);
}

template <class T, class Sum>
inline void load(Sum* __restrict sums, const T* __restrict row, size_t count) {
    for (size_t i = 0; i < count; ++i) sums[i] = widen(row[i]);
}
template <class T, class Sum>
inline void accumulate(Sum* __restrict sums, const T* __restrict row, size_t count) {
    for (size_t i = 0; i < count; ++i) sums[i] += widen(row[i]);
}
template <class T, class Sum>
inline void store(T* __restrict dst, const Sum* __restrict sums, size_t count) {
    for (size_t i = 0; i < count; ++i) narrow(sums[i], dst[i]);
}

// 16-bit rows: summed in a block of fp32, rounded once.
template <class T>
inline __attribute__((always_inline)) void sum_narrow(T* dst, const T* const* rows, int num_rows, size_t count) {
    alignas(64) float sums[kBlock];
    for (size_t first = 0; first < count; first += kBlock) {
        const size_t size = std::min(kBlock, count - first);
        load(sums, rows[0] + first, size);
        for (int row = 1; row < num_rows; ++row) accumulate(sums, rows[row] + first, size);
        store(dst + first, sums, size);
    }
}

template <class T>
inline __attribute__((always_inline)) void sum_wide(T* __restrict dst, const T* const* rows, int num_rows,
                                                    size_t count) {
    for (size_t first = 0; first < count; first += kBlock) {
        const size_t size = std::min(kBlock, count - first);
        T* __restrict out = dst + first;
        for (size_t i = 0; i < size; ++i) out[i] = rows[0][first + i] + rows[1][first + i];
        for (int row = 2; row < num_rows; ++row) {
            const T* __restrict in = rows[row] + first;
            for (size_t i = 0; i < size; ++i) out[i] += in[i];
        }
    }
}

template <class T>
bool sum_few(T* dst, const T* const* rows, int num_rows, size_t count) {
    if (num_rows == 0) std::memset(dst, 0, count * sizeof(T));
    if (num_rows == 1) std::memcpy(dst, rows[0], count * sizeof(T));
    return num_rows < 2;
}

}  // namespace

EP_WIDE void sum_rows(BFloat16* dst, const BFloat16* const* rows, int num_rows, size_t count) {
    if (!sum_few(dst, rows, num_rows, count)) sum_narrow(dst, rows, num_rows, count);
}
EP_WIDE void sum_rows(Float16* dst, const Float16* const* rows, int num_rows, size_t count) {
    if (!sum_few(dst, rows, num_rows, count)) sum_narrow(dst, rows, num_rows, count);
}
EP_WIDE void sum_rows(float* dst, const float* const* rows, int num_rows, size_t count) {
    if (!sum_few(dst, rows, num_rows, count)) sum_wide(dst, rows, num_rows, count);
}
EP_WIDE void sum_rows(double* dst, const double* const* rows, int num_rows, size_t count) {
    if (!sum_few(dst, rows, num_rows, count)) sum_wide(dst, rows, num_rows, count);
}

void copy_streaming(void* dst, const void* src, size_t bytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
    char* out = static_cast<char*>(dst);
    const char* in = static_cast<const char*>(src);
    const size_t head = std::min<size_t>(bytes, -reinterpret_cast<uintptr_t>(out) & 15);
    std::memcpy(out, in, head);
    size_t done = head;
    for (; done + 64 <= bytes; done += 64) {
        const __m128i* line = reinterpret_cast<const __m128i*>(in + done);
        __m128i* target = reinterpret_cast<__m128i*>(out + done);
        const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
        const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(out + done, in + done, bytes - done);
#else
    std::memcpy(dst, src, bytes);
#endif
}

}  // namespace ep
