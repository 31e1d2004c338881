#pragma once

#include "launch/cuda/group.inl"

namespace ep {

template <class P, bool kWeighted>
void CombineLaunch<P, kWeighted>::run(const CombineJoint<P>& joint, size_t ranks, DType dtype,
                                      CudaStream stream) {
    with_type(dtype, [&]<class T>() {
        launch(kernels::combine_kernel<T, kWeighted, CombineJoint<P>>, joint, ranks, stream);
    });
}

}  // namespace ep
