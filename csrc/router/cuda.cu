// Launches of the router's CUDA kernels.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "core/cuda/runtime.h"
#include "router/kernels.h"
#include "router/router.h"

namespace ep {
namespace router {
namespace {

// Launches kernel(config, args, bytes_per_warp) with a warp per row.
template <class Args>
void launch_rows(void (*kernel)(RouterConfig, Args, int), const RouterConfig& config,
                 const Args& args, size_t bytes_per_warp, cudaStream_t stream) {
    constexpr size_t kWithoutOptIn = 48 * 1024;
    if (args.tokens == 0) return;
    int warps = kMaxWarps;
    while (warps > 1 && warps * bytes_per_warp > kWithoutOptIn) warps /= 2;
    const size_t shared = warps * bytes_per_warp;
    if (shared > kWithoutOptIn) {
        int device = 0, most = 0;
        check_cuda(cudaGetDevice(&device), "cudaGetDevice");
        check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                   "cudaDeviceGetAttribute");
        if (shared > static_cast<size_t>(most)) {
            throw std::invalid_argument("logits has " + std::to_string(config.experts) +
                                        " experts, which need " + std::to_string(shared) +
                                        " bytes of shared memory; this GPU has " +
                                        std::to_string(most));
        }
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared)),
                   "cudaFuncSetAttribute");
    }
    const int64_t blocks = (args.tokens + warps - 1) / warps;
    kernel<<<dim3(static_cast<unsigned>(blocks)), dim3(32, warps), shared, stream>>>(
        config, args, static_cast<int>(bytes_per_warp));
    check_cuda(cudaGetLastError(), "kernel launch");
}

}  // namespace
}  // namespace router

void router_forward_cuda(const RouterConfig& config, const RouterForward& args,
                         void* stream_handle) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    check_cuda(cudaMemsetAsync(args.tokens_per_expert, 0, config.experts * sizeof(int64_t), stream),
               "cudaMemsetAsync");
    with_type(args.dtype, [&]<class T>() {
        using Scratch = router::ForwardScratch<router::Real<T>>;
        router::launch_rows(router::router_forward<T>, config, args,
                            router::scratch_bytes<Scratch>(config), stream);
    });
}

void router_backward_cuda(const RouterConfig& config, const RouterBackward& args,
                          void* stream_handle) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    with_type(args.dtype, [&]<class T>() {
        using Scratch = router::BackwardScratch<router::Real<T>>;
        router::launch_rows(router::router_backward<T>, config, args,
                            router::scratch_bytes<Scratch>(config), stream);
    });
}

}  // namespace ep
