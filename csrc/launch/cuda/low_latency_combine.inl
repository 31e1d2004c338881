#pragma once

#include "launch/cuda/dtypes.h"
#include "launch/cuda/low_latency.inl"

// Combine's launches in the low-latency mode. Only the files that compile combine include this: a
// kernel compiled in two files becomes two kernels, and the attributes set for one miss the other.
namespace ep {

template <class P>
void CudaLowLatency<P>::load_combine() {
    using L = LowLatencyCombineLaunch<P>;
    const auto load_all = [&]<bool kLines>() {
        for_each_launches([&]<LowLatencyLaunches kLaunches>() {
            for_each_built_type([&]<class T>() {
                load(kernels::low_latency_combine_kernel<kLaunches, T, kLines, L>);
            });
        });
    };
    load_all.template operator()<false>();
    if (heap_.lines) with_lines<P>(true, load_all);
}

template <class P>
void CudaLowLatency<P>::combine(LowLatencyLaunches launches,
                                const std::vector<LowLatencyCombineArgs>& args, DType dtype,
                                CudaStream stream) const {
    using L = LowLatencyCombineLaunch<P>;
    with_built_type(dtype, [&]<class T>() {
        with_lines<P>(args.front().by_lines(), [&]<bool kLines>() {
            run_launches(launches, args.size() == 1, [&]<LowLatencyLaunches kLaunches>() {
                launch(kernels::low_latency_combine_kernel<kLaunches, T, kLines, L>, early_, group_,
                       fabric_, args, blocks_, stream);
            });
        });
    });
}

}  // namespace ep
