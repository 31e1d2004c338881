#pragma once

#include <cuda_runtime.h>

#include "core/cuda/runtime.h"
#include "launch/cuda/load.h"
#include "launch/cuda/low_latency.h"
#include "launch/cuda/low_latency_kernels.h"

// CudaLowLatency's definitions but for combine's, which are in low_latency_combine.inl.
namespace ep {
namespace {

// Calls f.operator()<kLaunches>() for each value.
template <class F>
void for_each_launches(F&& f) {
    using enum LowLatencyLaunches;
    f.template operator()<Send>();
    f.template operator()<Receive>();
    f.template operator()<Both>();
}

// Whether a kernel waits by itself for the previous launch (Architecture::kHasEarlyLaunches) and a
// graph can hold such launches. Code for Hopper may run on later GPUs, where this is not used.
inline bool may_come_early(const cudaFuncAttributes& kernel, int device) {
    constexpr int kFirstWithGraphs = 12030;
    int driver = 0;
    check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    return kernel.ptxVersion == 90 && CudaDevice::of(device).major == 9 &&
           driver >= kFirstWithGraphs;
}

// Launches a kernel for each rank. early: the kernel waits by itself for the previous launch, so
// its blocks may start as soon as that launch allows it.
template <class P, class Args>
void launch(void (*kernel)(LowLatencyLaunch<P, Args>), bool early, const CudaGroup<P>& group,
            const P& fabric, const std::vector<Args>& args, int blocks, CudaStream stream) {
    const DeviceGuard guard(group.device());
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kBlockThreads);
    config.dynamicSmemBytes = shared_bytes();
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = early;
    for (size_t i = 0; i < args.size(); ++i) {
        const LowLatencyLaunch<P, Args> params{fabric, args[i], group.device_rank(i)};
        check_cuda(cudaLaunchKernelEx(&config, kernel, params), "kernel launch");
    }
}

}  // namespace

template <class P>
CudaLowLatency<P>::CudaLowLatency(const CudaGroup<P>& group, const LowLatencyHeap& heap,
                                  const P& fabric, const std::vector<char*>& own_heaps, int blocks)
    : group_(group), heap_(heap), fabric_(fabric), own_heaps_(own_heaps), blocks_(blocks) {
    const DeviceGuard guard(group_.device());
    load_dispatch();
    load_combine();
    fabric_.reset_signals(group_.ranks().front(), group_.timeout_ns());
}

// Calls run.operator()<kLaunches>() for each launch. as_one: puts both halves in one launch, for a
// process with one rank. Ranks are launched in turn, so a first one would wait for the second.
template <class Run>
void run_launches(LowLatencyLaunches launches, bool as_one, Run&& run) {
    using enum LowLatencyLaunches;
    if (launches == Both && as_one) return run.template operator()<Both>();
    if (sends(launches)) run.template operator()<Send>();
    if (receives(launches)) run.template operator()<Receive>();
}

// Calls f.operator()<kLines>(). kLines: whether rows travel as lines.
template <class P, class F>
void with_lines(bool lines, F&& f) {
    if constexpr (P::Fabric::kKeepsLines) {
        if (lines) return f.template operator()<true>();
    }
    f.template operator()<false>();
}

template <class P>
void CudaLowLatency<P>::load_dispatch() {
    using L = LowLatencyDispatchLaunch<P>;
    with_lines<P>(heap_.lines, [&]<bool kLines>() {
        for_each_launches([&]<LowLatencyLaunches kLaunches>() {
            auto kernel_of = kernels::low_latency_dispatch_of<kLaunches, kLines, L>;
            for (const RowKind kind : {RowKind::Quantized, RowKind::Flat}) load(kernel_of(kind));
            early_ = may_come_early(load(kernel_of(RowKind::Grouped)), group_.device());
        });
    });
}

template <class P>
void CudaLowLatency<P>::dispatch(LowLatencyLaunches launches,
                                 const std::vector<LowLatencyDispatchArgs>& args,
                                 CudaStream stream) const {
    using L = LowLatencyDispatchLaunch<P>;
    const RowKind kind = args.front().row_kind();
    with_lines<P>(heap_.lines, [&]<bool kLines>() {
        run_launches(launches, args.size() == 1, [&]<LowLatencyLaunches kLaunches>() {
            launch(kernels::low_latency_dispatch_of<kLaunches, kLines, L>(kind), early_, group_,
                   fabric_, args, blocks_, stream);
        });
    });
}

template <class P>
void CudaLowLatency<P>::reset() {
    const DeviceGuard guard(group_.device());
    for (char* base : own_heaps_) check_cuda(cudaMemset(base, 0, heap_.bytes()), "cudaMemset");
    synchronize_device();
    fabric_.reset_signals(group_.ranks().front(), group_.timeout_ns());
}

}  // namespace ep
