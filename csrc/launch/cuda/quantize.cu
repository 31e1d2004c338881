#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "core/cuda/runtime.h"
#include "launch/cuda/quantize.h"
#include "launch/cuda/quantize_kernels.h"

namespace ep {
namespace {

// Launches kernel.operator()<T, kWide>(): wide if hidden and alignment allow wide accesses.
template <class Kernel>
void launch(const QuantizeArgs& args, void* stream, Kernel&& kernel) {
    const int blocks_per_row = (args.hidden + kScaleBlock - 1) / kScaleBlock;
    const int64_t blocks =
        (args.rows * blocks_per_row + kQuantizeThreads / 32 - 1) / (kQuantizeThreads / 32);
    const auto is_aligned = [](const void* address, size_t element) {
        return reinterpret_cast<uintptr_t>(address) % (element * kQuantizeElements) == 0;
    };
    with_type(args.dtype, [&]<class T>() {
        if constexpr (!std::is_same_v<T, double>) {
            if (blocks == 0) return;
            const bool wide = args.hidden % kQuantizeElements == 0 &&
                              is_aligned(args.reals, sizeof(T)) && is_aligned(args.values, 1);
            const auto chosen = wide ? kernel.template operator()<T, true>()
                                     : kernel.template operator()<T, false>();
            const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 16));
            chosen<<<grid, kQuantizeThreads, 0, static_cast<cudaStream_t>(stream)>>>(
                args, blocks_per_row);
            check_cuda(cudaGetLastError(), "kernel launch");
        } else {
            throw std::invalid_argument("dtype is float64, must be bfloat16, float16 or float32");
        }
    });
}

}  // namespace

void quantize_cuda(const QuantizeArgs& args, void* stream) {
    launch(args, stream, []<class T, bool kWide>() { return &quantize_kernel<T, kWide>; });
}

void dequantize_cuda(const QuantizeArgs& args, void* stream) {
    launch(args, stream, []<class T, bool kWide>() { return &dequantize_kernel<T, kWide>; });
}

}  // namespace ep
