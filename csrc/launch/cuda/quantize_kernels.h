#pragma once

#include <bit>
#include <cstdint>

#include "core/float8.h"
#include "exec/device/quantize.h"
#include "exec/device/sums.h"
#include "launch/cuda/quantize.h"

namespace ep {

constexpr int kQuantizeThreads = 256;
constexpr int kQuantizeElements = 4;  // elements per lane: 32 lanes have a block

// A lane's elements of a block: adjacent if `wide`, which takes rows that are aligned to them.
template <class T>
struct alignas(sizeof(T) * kQuantizeElements) Quad {
    T values[kQuantizeElements];
};
template <bool wide>
EP_FN int own_element(int e) {
    return wide ? kQuantizeElements * rows::lane_id() + e : rows::lane_id() + 32 * e;
}
template <bool wide, class T>
EP_FN Quad<T> load_own(const T* block, int left) {
    Quad<T> own{};
    if constexpr (wide) {
        const int first = own_element<wide>(0);
        if (first < left) own = *reinterpret_cast<const Quad<T>*>(block + first);
    } else {
#pragma unroll
        for (int e = 0; e < kQuantizeElements; ++e) {
            if (own_element<wide>(e) < left) own.values[e] = block[own_element<wide>(e)];
        }
    }
    return own;
}
template <bool wide, class T>
EP_FN void store_own(T* block, int left, const Quad<T>& own) {
    if constexpr (wide) {
        const int first = own_element<wide>(0);
        if (first < left) *reinterpret_cast<Quad<T>*>(block + first) = own;
    } else {
#pragma unroll
        for (int e = 0; e < kQuantizeElements; ++e) {
            if (own_element<wide>(e) < left) block[own_element<wide>(e)] = own.values[e];
        }
    }
}

// Calls f(number, first, left) for the warp's blocks: a block begins with element `first`, and its
// row has `left` elements from there on.
template <class F>
EP_FN void for_own_blocks(int64_t rows, int hidden, int blocks_per_row, F&& f) {
    constexpr int kWarps = kQuantizeThreads / 32;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
         i < rows * blocks_per_row; i += static_cast<int64_t>(gridDim.x) * kWarps) {
        const int before = static_cast<int>(i % blocks_per_row) * kScaleBlock;
        f(i, i / blocks_per_row * hidden + before, hidden - before);
    }
}

template <class T, bool wide>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_kernel(const QuantizeArgs args, int blocks_per_row) {
    for_own_blocks(args.rows, args.hidden, blocks_per_row, [&](int64_t i, int64_t first, int left) {
        const Quad<T> in = load_own<wide>(static_cast<const T*>(args.reals) + first, left);
        float largest = 0;
#pragma unroll
        for (int e = 0; e < kQuantizeElements; ++e)
            largest = ptx::max_nan(largest, fabsf(rows::widen(in.values[e])));
#pragma unroll
        for (int distance = 16; distance; distance /= 2)
            largest = ptx::max_nan(largest, __shfl_xor_sync(rows::kAllLanes, largest, distance));
        const bool is_e5m2 = args.value_format == ValueFormat::E5m2;
        const float scale =
            scale_of(largest, args.scale_format, is_e5m2 ? kLargestE5m2 : kLargestE4m3);
        if (rows::lane_id() == 0) args.scales[i] = scale;
        auto divided = [&](int e) { return __fdiv_rn(rows::widen(in.values[e]), scale); };
        auto pair = [&](int e) -> uint32_t {
            return is_e5m2 ? rows::pack_e5m2(divided(e), divided(e + 1))
                           : rows::pack_e4m3(divided(e), divided(e + 1));
        };
        const uint32_t out = pair(0) | pair(2) << 16;
        store_own<wide>(args.values + first, left, std::bit_cast<Quad<uint8_t>>(out));
    });
}

template <class T, bool wide>
__global__ void __launch_bounds__(kQuantizeThreads)
    dequantize_kernel(const QuantizeArgs args, int blocks_per_row) {
    for_own_blocks(args.rows, args.hidden, blocks_per_row, [&](int64_t i, int64_t first, int left) {
        const float scale = args.scales[i];
        const auto in = std::bit_cast<uint32_t>(load_own<wide>(args.values + first, left));
        auto unpack = [&](uint32_t pair) {
            return args.value_format == ValueFormat::E5m2
                       ? rows::unpack_e5m2(static_cast<uint16_t>(pair))
                       : rows::unpack_e4m3(static_cast<uint16_t>(pair));
        };
        const uint32_t halves[] = {unpack(in), unpack(in >> 16)};
        Quad<T> out;
#pragma unroll
        for (int e = 0; e < kQuantizeElements; ++e) {
            const auto half = static_cast<uint16_t>(halves[e / 2] >> 16 * (e % 2));
            rows::narrow(__fmul_rn(ptx::widen_fp16(half), scale), out.values[e]);
        }
        store_own<wide>(static_cast<T*>(args.reals) + first, left, out);
    });
}

}  // namespace ep
