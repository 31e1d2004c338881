#pragma once

#include <cstdint>

#include "core/float8.h"
#include "exec/device/formats.h"
#include "exec/device/sums.h"
#include "launch/cuda/quantize.h"

namespace ep {

constexpr int kQuantizeThreads = 256;
constexpr int kQuantizeElements = 4;  // elements per lane: 32 lanes have a block

// In both kernels a warp handles one block of a row. wide: rows are aligned so that a lane can
// access its elements, then adjacent, at once.
template <class T, bool wide>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_kernel(const QuantizeArgs args, int blocks_per_row) {
    const int lane = rows::lane_id();
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (kQuantizeThreads / 32);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * (kQuantizeThreads / 32) + threadIdx.x / 32;
         i < args.rows * blocks_per_row; i += warps) {
        const int block = static_cast<int>(i % blocks_per_row);
        const int64_t first = i / blocks_per_row * args.hidden + block * kScaleBlock;
        const int left = args.hidden - block * kScaleBlock;
        auto index = [&](int e) { return wide ? kQuantizeElements * lane + e : lane + 32 * e; };
        const T* x = static_cast<const T*>(args.x) + first;
        struct alignas(sizeof(T) * kQuantizeElements) Wide {
            T values[kQuantizeElements];
        } in{};
        if constexpr (wide) {
            if (index(0) < left) in = *reinterpret_cast<const Wide*>(x + index(0));
        } else {
#pragma unroll
            for (int e = 0; e < kQuantizeElements; ++e) {
                if (index(e) < left) in.values[e] = x[index(e)];
            }
        }
        float largest = 0;
#pragma unroll
        for (int e = 0; e < kQuantizeElements; ++e)
            largest = ptx::max_nan(largest, fabsf(rows::widen(in.values[e])));
#pragma unroll
        for (int distance = 16; distance; distance /= 2) {
            largest = ptx::max_nan(largest, __shfl_xor_sync(rows::kAllLanes, largest, distance));
        }
        const float scale = scale_of(largest, ScaleFormat::Fp32);
        if (lane == 0) args.scales[i] = scale;
        auto divided = [&](int e) { return __fdiv_rn(rows::widen(in.values[e]), scale); };
        const uint32_t out = rows::pack_e4m3(divided(0), divided(1)) |
                             static_cast<uint32_t>(rows::pack_e4m3(divided(2), divided(3))) << 16;
        if constexpr (wide) {
            if (index(0) < left) *reinterpret_cast<uint32_t*>(args.values + first + index(0)) = out;
        } else {
#pragma unroll
            for (int e = 0; e < kQuantizeElements; ++e) {
                if (index(e) < left)
                    args.values[first + index(e)] = static_cast<uint8_t>(out >> 8 * e);
            }
        }
    }
}

template <class T, bool wide>
__global__ void __launch_bounds__(kQuantizeThreads)
    dequantize_kernel(const DequantizeArgs args, int blocks_per_row) {
    const int lane = rows::lane_id();
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (kQuantizeThreads / 32);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * (kQuantizeThreads / 32) + threadIdx.x / 32;
         i < args.rows * blocks_per_row; i += warps) {
        const int block = static_cast<int>(i % blocks_per_row);
        const int64_t first = i / blocks_per_row * args.hidden + block * kScaleBlock;
        const int left = args.hidden - block * kScaleBlock;
        auto index = [&](int e) { return wide ? kQuantizeElements * lane + e : lane + 32 * e; };
        const float scale = args.scales[i];
        uint32_t in = 0;
        if constexpr (wide) {
            if (index(0) < left)
                in = *reinterpret_cast<const uint32_t*>(args.values + first + index(0));
        } else {
#pragma unroll
            for (int e = 0; e < kQuantizeElements; ++e) {
                if (index(e) < left)
                    in |= static_cast<uint32_t>(args.values[first + index(e)]) << 8 * e;
            }
        }
        const uint32_t halves[] = {rows::unpack_e4m3(static_cast<uint16_t>(in)),
                                   rows::unpack_e4m3(static_cast<uint16_t>(in >> 16))};
        struct alignas(sizeof(T) * kQuantizeElements) Wide {
            T values[kQuantizeElements];
        } out;
#pragma unroll
        for (int e = 0; e < kQuantizeElements; ++e) {
            const auto half = static_cast<uint16_t>(halves[e / 2] >> 16 * (e % 2));
            rows::narrow(__fmul_rn(ptx::widen_fp16(half), scale), out.values[e]);
        }
        T* to = static_cast<T*>(args.out) + first;
        if constexpr (wide) {
            if (index(0) < left) *reinterpret_cast<Wide*>(to + index(0)) = out;
        } else {
#pragma unroll
            for (int e = 0; e < kQuantizeElements; ++e) {
                if (index(e) < left) to[index(e)] = out.values[e];
            }
        }
    }
}

}  // namespace ep
