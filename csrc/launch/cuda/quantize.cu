#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "core/cuda/runtime.h"
#include "core/float8.h"
#include "exec/device/formats.h"
#include "exec/device/sums.h"
#include "launch/cuda/quantize.h"

namespace ep {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;  // of a lane: 32 lanes make a block

// In both a warp takes a block of a row; a lane's elements lie side by side where rows allow wide
// accesses.
template <class T, bool wide>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const QuantizeArgs args, int blocks_per_row) {
    const int lane = rows::lane_id();
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
         i < args.rows * blocks_per_row; i += warps) {
        const int block = static_cast<int>(i % blocks_per_row);
        const int64_t first = i / blocks_per_row * args.hidden + block * kScaleBlock;
        const int left = args.hidden - block * kScaleBlock;
        auto index = [&](int e) { return wide ? kElements * lane + e : lane + 32 * e; };
        const T* x = static_cast<const T*>(args.x) + first;
        struct alignas(sizeof(T) * kElements) Wide {
            T values[kElements];
        } in{};
        if constexpr (wide) {
            if (index(0) < left) in = *reinterpret_cast<const Wide*>(x + index(0));
        } else {
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                if (index(e) < left) in.values[e] = x[index(e)];
            }
        }
        float largest = 0;
#pragma unroll
        for (int e = 0; e < kElements; ++e)
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
            for (int e = 0; e < kElements; ++e) {
                if (index(e) < left)
                    args.values[first + index(e)] = static_cast<uint8_t>(out >> 8 * e);
            }
        }
    }
}

template <class T, bool wide>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const DequantizeArgs args, int blocks_per_row) {
    const int lane = rows::lane_id();
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
         i < args.rows * blocks_per_row; i += warps) {
        const int block = static_cast<int>(i % blocks_per_row);
        const int64_t first = i / blocks_per_row * args.hidden + block * kScaleBlock;
        const int left = args.hidden - block * kScaleBlock;
        auto index = [&](int e) { return wide ? kElements * lane + e : lane + 32 * e; };
        const float scale = args.scales[i];
        uint32_t in = 0;
        if constexpr (wide) {
            if (index(0) < left)
                in = *reinterpret_cast<const uint32_t*>(args.values + first + index(0));
        } else {
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                if (index(e) < left)
                    in |= static_cast<uint32_t>(args.values[first + index(e)]) << 8 * e;
            }
        }
        const uint32_t halves[] = {rows::unpack_e4m3(static_cast<uint16_t>(in)),
                                   rows::unpack_e4m3(static_cast<uint16_t>(in >> 16))};
        struct alignas(sizeof(T) * kElements) Wide {
            T values[kElements];
        } out;
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const auto half = static_cast<uint16_t>(halves[e / 2] >> 16 * (e % 2));
            rows::narrow(__fmul_rn(ptx::widen_fp16(half), scale), out.values[e]);
        }
        T* to = static_cast<T*>(args.out) + first;
        if constexpr (wide) {
            if (index(0) < left) *reinterpret_cast<Wide*>(to + index(0)) = out;
        } else {
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                if (index(e) < left) to[index(e)] = out.values[e];
            }
        }
    }
}

// The first kernel is for rows that allow wide accesses.
template <class T, class Args, class Kernel>
void launch(const Args& args, const void* reals, const uint8_t* values, Kernel wide_kernel,
            Kernel kernel, cudaStream_t stream) {
    const int blocks_per_row = (args.hidden + kScaleBlock - 1) / kScaleBlock;
    const int64_t blocks = (args.rows * blocks_per_row + kThreads / 32 - 1) / (kThreads / 32);
    if (blocks == 0) return;
    const bool wide = args.hidden % kElements == 0 &&
                      reinterpret_cast<uintptr_t>(reals) % (sizeof(T) * kElements) == 0 &&
                      reinterpret_cast<uintptr_t>(values) % kElements == 0;
    const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 16));
    (wide ? wide_kernel : kernel)<<<grid, kThreads, 0, stream>>>(args, blocks_per_row);
    check_cuda(cudaGetLastError(), "kernel launch");
}

}  // namespace

void quantize_cuda(const QuantizeArgs& args, void* stream) {
    with_type(args.dtype, [&]<class T>() {
        if constexpr (!std::is_same_v<T, double>) {
            launch<T>(args, args.x, args.values, quantize_kernel<T, true>,
                      quantize_kernel<T, false>, static_cast<cudaStream_t>(stream));
        } else {
            throw std::invalid_argument("x is float64, must be bfloat16, float16 or float32");
        }
    });
}

void dequantize_cuda(const DequantizeArgs& args, void* stream) {
    with_type(args.dtype, [&]<class T>() {
        if constexpr (!std::is_same_v<T, double>) {
            launch<T>(args, args.out, args.values, dequantize_kernel<T, true>,
                      dequantize_kernel<T, false>, static_cast<cudaStream_t>(stream));
        } else {
            throw std::invalid_argument("dtype is float64, must be bfloat16, float16 or float32");
        }
    });
}

}  // namespace ep
