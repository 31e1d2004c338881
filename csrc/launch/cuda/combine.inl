#pragma once

#include "launch/cuda/group.inl"

namespace ep {

template <class P, int kRanks, bool kWeighted>
void CombineLaunch<P, kRanks, kWeighted>::run(const CombineJoint<P, kRanks>& joint, size_t ranks,
                                              DType dtype, CudaStream stream) {
    with_type(dtype, [&]<class T>() {
        launch(kernels::combine_kernel<T, kWeighted, CombineJoint<P, kRanks>>, joint, ranks,
               stream);
    });
}

}  // namespace ep
