#include "exec/host/rows.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "exec/host/wide.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// A product is rounded before it is added, as on the GPU: no fused multiply-add of wider machines.
#define EP_UNFUSED __attribute__((optimize("fp-contract=off")))

namespace ep {
namespace {

// Elements of a wide row that are summed at a time: they stay in the L1 cache.
constexpr size_t kBlock = 1024;

// 16-bit elements are summed in registers, a few vectors at a time. The vectors are GCC's: it maps
// them to what the machine has, and does that well only if they are not wider.
template <size_t kWidth>
struct Vectors {
    static constexpr size_t kLanes = kWidth, kWhole = 32;
    // GCC drops the attribute of a template's "using".
    typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
    typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
    typedef float Floats __attribute__((vector_size(kWidth * 4)));
};

template <class V>
EP_INLINE typename V::Floats widen(typename V::Words bits, BFloat16) {
    return std::bit_cast<typename V::Floats>(bits << 16);
}

// Round to nearest even; a NaN stays a (quiet) NaN.
template <class V>
EP_INLINE typename V::Words narrow(typename V::Floats values, BFloat16) {
    using Words = typename V::Words;
    const Words bits = std::bit_cast<Words>(values);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded;
}

// IEEE half by way of fp32 arithmetic: scaling by a power of two moves the exponent's bias and
// handles subnormals.
template <class V>
EP_INLINE typename V::Floats widen(typename V::Words bits, Float16) {
    using Words = typename V::Words;
    using Floats = typename V::Floats;
    const Words scaled =
        std::bit_cast<Words>(std::bit_cast<Floats>((bits & 0x7fff) << 13) * 0x1p112f);
    const Words infinity = std::bit_cast<Words>((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return std::bit_cast<Floats>(scaled | infinity | (bits & 0x8000) << 16);
}

template <class V>
EP_INLINE typename V::Words narrow(typename V::Floats values, Float16) {
    using Words = typename V::Words;
    const Words bits = std::bit_cast<Words>(values);
    const Words magnitude = bits & 0x7fffffff;
    const Words normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const Words subnormal =
        std::bit_cast<Words>(std::bit_cast<typename V::Floats>(magnitude) + 0.5f) - 0x3f000000;
    const Words finite = magnitude < 0x38800000 ? subnormal : normal;
    const Words special = magnitude > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00;
    return (magnitude >= 0x477ff000 ? special : finite) | (bits >> 16 & 0x8000);
}

// In place of weights, if there are none.
struct NoWeights {};
template <class Floats>
EP_INLINE Floats times(Floats values, NoWeights, int) {
    return values;
}
template <class Floats, class Weight>
EP_INLINE Floats times(Floats values, const Weight* weights, int row) {
    return values * weights[row];
}

// Sums V::kWhole elements from `first` on; only at a row's end `size` is less, and fits in a
// vector.
template <class V, class T, class Weights>
EP_INLINE void sum_narrow_block(T* dst, const T* const* rows, Weights weights, int num_rows,
                                size_t first, size_t size) {
    using Halves = typename V::Halves;
    const size_t bytes = size == V::kWhole ? sizeof(Halves) : size * sizeof(T);
    auto load = [&](const T* row, size_t vector) EP_INLINED {
        Halves halves{};
        std::memcpy(&halves, row + first + vector * V::kLanes, bytes);
        return widen<V>(__builtin_convertvector(halves, typename V::Words), T{});
    };
    const size_t vectors = size == V::kWhole ? V::kWhole / V::kLanes : 1;
    typename V::Floats sums[V::kWhole / V::kLanes];
    for (size_t v = 0; v < vectors; ++v) sums[v] = times(load(rows[0], v), weights, 0);
    for (int row = 1; row < num_rows; ++row) {
        for (size_t v = 0; v < vectors; ++v) sums[v] += times(load(rows[row], v), weights, row);
    }
    for (size_t v = 0; v < vectors; ++v) {
        const Halves halves = __builtin_convertvector(narrow<V>(sums[v], T{}), Halves);
        std::memcpy(dst + first + v * V::kLanes, &halves, bytes);
    }
}

template <class V, class T, class Weights>
EP_INLINE void sum_narrow(T* dst, const T* const* rows, Weights weights, int num_rows,
                          size_t count) {
    size_t first = 0;
    for (; first + V::kWhole <= count; first += V::kWhole)
        sum_narrow_block<V>(dst, rows, weights, num_rows, first, V::kWhole);
    for (; first < count; first += V::kLanes) {
        const size_t size = std::min(V::kLanes, count - first);
        sum_narrow_block<V>(dst, rows, weights, num_rows, first, size);
    }
}

template <class T, class Weights>
EP_WIDE EP_UNFUSED void sum_by_wide(T* dst, const T* const* rows, Weights weights, int num_rows,
                                    size_t count) {
    sum_narrow<Vectors<8>>(dst, rows, weights, num_rows, count);
}

template <class T, class Weights>
EP_WIDEST EP_UNFUSED void sum_by_widest(T* dst, const T* const* rows, Weights weights, int num_rows,
                                        size_t count) {
    sum_narrow<Vectors<16>>(dst, rows, weights, num_rows, count);
}

template <class T, class Weights>
void sum_16_bit(T* dst, const T* const* rows, Weights weights, int num_rows, size_t count) {
    (kHasWidest ? sum_by_widest<T, Weights> : sum_by_wide<T, Weights>)(dst, rows, weights, num_rows,
                                                                       count);
}

template <class T, class Weights>
EP_WIDE EP_UNFUSED void sum_wide(T* __restrict dst, const T* const* rows, Weights weights,
                                 int num_rows, size_t count) {
    for (size_t first = 0; first < count; first += kBlock) {
        const size_t size = std::min(kBlock, count - first);
        T* __restrict out = dst + first;
        const T* __restrict zeroth = rows[0] + first;
        if (num_rows == 1) {
            for (size_t i = 0; i < size; ++i) out[i] = times(zeroth[i], weights, 0);
            continue;
        }
        const T* __restrict next = rows[1] + first;
        for (size_t i = 0; i < size; ++i)
            out[i] = times(zeroth[i], weights, 0) + times(next[i], weights, 1);
        for (int row = 2; row < num_rows; ++row) {
            const T* __restrict in = rows[row] + first;
            for (size_t i = 0; i < size; ++i) out[i] += times(in[i], weights, row);
        }
    }
}

template <class T, class Weights>
void sum_any(T* dst, const T* const* rows, Weights weights, int num_rows, size_t count) {
    if (num_rows == 0) {
        std::memset(dst, 0, count * sizeof(T));
    } else if constexpr (sizeof(T) == 2) {
        sum_16_bit(dst, rows, weights, num_rows, count);
    } else {
        sum_wide(dst, rows, weights, num_rows, count);
    }
}

}  // namespace

template <class T>
void sum_rows(T* dst, const T* const* rows, int num_rows, size_t count) {
    if (num_rows == 1) return void(std::memcpy(dst, rows[0], count * sizeof(T)));
    sum_any(dst, rows, NoWeights{}, num_rows, count);
}
template <class T>
void weighted_sum_rows(T* dst, const T* const* rows, const Accumulator<T>* weights, int num_rows,
                       size_t count) {
    sum_any(dst, rows, weights, num_rows, count);
}
#define EP_SUMS(T)                                            \
    template void sum_rows(T*, const T* const*, int, size_t); \
    template void weighted_sum_rows(T*, const T* const*, const Accumulator<T>*, int, size_t);
EP_SUMS(BFloat16)
EP_SUMS(Float16)
EP_SUMS(float)
EP_SUMS(double)

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

void finish_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace ep
