#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "core/cuda/runtime.h"
#include "launch/cuda/quantize.h"
#include "launch/cuda/quantize_kernels.h"

namespace ep {
namespace {

// Launches wide_kernel if hidden and alignment allow wide accesses, else `kernel`.
template <class T, class Args, class Kernel>
void launch(const Args& args, const void* reals, const uint8_t* values, Kernel wide_kernel,
            Kernel kernel, cudaStream_t stream) {
    const int blocks_per_row = (args.hidden + kScaleBlock - 1) / kScaleBlock;
    const int64_t blocks =
        (args.rows * blocks_per_row + kQuantizeThreads / 32 - 1) / (kQuantizeThreads / 32);
    if (blocks == 0) return;
    const bool wide = args.hidden % kQuantizeElements == 0 &&
                      reinterpret_cast<uintptr_t>(reals) % (sizeof(T) * kQuantizeElements) == 0 &&
                      reinterpret_cast<uintptr_t>(values) % kQuantizeElements == 0;
    const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 16));
    (wide ? wide_kernel : kernel)<<<grid, kQuantizeThreads, 0, stream>>>(args, blocks_per_row);
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
