#pragma once

#include "launch/cuda/dtypes.h"
#include "launch/cuda/group.inl"

namespace ep {

template <class P, int kRanks, bool kWeighted>
void CombineLaunch<P, kRanks, kWeighted>::load_kernels() {
    using L = CombineParams<P, kRanks>;
    for_each_built_type([&]<class T>() {
        load(kernels::combine_kernel<T, kWeighted, L>);
        load(kernels::intra_rank_reduce_kernel<T, kWeighted, L>);
    });
}

template <class P, int kRanks, bool kWeighted>
void CombineLaunch<P, kRanks, kWeighted>::run(const CombineParams<P, kRanks>& params, size_t ranks,
                                              DType dtype, CudaStream stream,
                                              const SideStream& side_stream) {
    using L = CombineParams<P, kRanks>;
    with_built_type(dtype, [&]<class T>() {
        if (!any_intra_rank_pass(params, ranks))
            return launch(kernels::combine_kernel<T, kWeighted, L>, params, ranks, stream);
        // The pass comes first, or it might find no SM while the exchange waits for it.
        const CudaEvent begun = side_stream.begun(stream);
        launch(kernels::intra_rank_reduce_kernel<T, kWeighted, L>,
               spread(params, ranks, side_stream.sms), ranks, side_stream.fork(stream), false,
               begun);
        side_stream.wait_for(begun, stream);
        launch(kernels::combine_kernel<T, kWeighted, L>, params, ranks, stream);
        side_stream.join(stream);
    });
}

}  // namespace ep
