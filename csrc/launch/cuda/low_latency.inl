#pragma once

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"
#include "launch/cuda/low_latency.h"
#include "launch/cuda/low_latency_kernels.h"

namespace ep {
namespace {

template <class P, class Args>
void launch_half(void (*kernel)(LowLatencyLaunch<P, Args>), const CudaGroup<P>& group,
                 const P& fabric, const std::vector<Args>& args, int blocks, CudaStream stream) {
    constexpr size_t kSharedBytes = kBlockWarps * sizeof(BulkBuffers);
    const DeviceGuard guard(group.device());
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "cudaFuncSetAttribute");
    for (size_t i = 0; i < args.size(); ++i) {
        kernel<<<blocks, kBlockThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(
            {fabric, args[i], group.device_rank(i)});
        check_cuda(cudaGetLastError(), "kernel launch");
    }
}

}  // namespace

template <class P>
CudaLowLatency<P>::CudaLowLatency(const CudaGroup<P>& group, const LowLatencyHeap& heap,
                                  const P& fabric, const std::vector<char*>& own_heaps, int blocks)
    : group_(group), heap_(heap), fabric_(fabric), own_heaps_(own_heaps), blocks_(blocks) {}

template <class P>
int CudaLowLatency<P>::warps() const {
    return blocks_ * kBlockWarps;
}

template <class P>
void CudaLowLatency<P>::dispatch(bool receive, const std::vector<LowLatencyDispatchArgs>& args,
                                 CudaStream stream) const {
    using L = LowLatencyDispatchLaunch<P>;
    const auto send = args.front().quantize == ScaleFormat::None
                          ? kernels::low_latency_dispatch_send_kernel<false, L>
                          : kernels::low_latency_dispatch_send_kernel<true, L>;
    launch_half(receive ? kernels::low_latency_dispatch_receive_kernel<L> : send, group_, fabric_,
                args, blocks_, stream);
    if (receive) group_.finish(outputs_of(args), stream, false);
}

template <class P>
void CudaLowLatency<P>::combine(bool receive, const std::vector<LowLatencyCombineArgs>& args,
                                DType dtype, CudaStream stream) const {
    using L = LowLatencyCombineLaunch<P>;
    with_type(dtype, [&]<class T>() {
        launch_half(receive ? kernels::low_latency_combine_receive_kernel<T, L>
                            : kernels::low_latency_combine_send_kernel<T, L>,
                    group_, fabric_, args, blocks_, stream);
    });
    if (receive) group_.finish(outputs_of(args), stream, false);
}

template <class P>
void CudaLowLatency<P>::reset() {
    const DeviceGuard guard(group_.device());
    for (char* base : own_heaps_) check_cuda(cudaMemset(base, 0, heap_.bytes()), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace ep
