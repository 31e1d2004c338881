#pragma once

#include "launch/cuda/group.inl"

namespace ep {

template <class P, int kRanks, bool kWeighted>
void CombineLaunch<P, kRanks, kWeighted>::run(const CombineJoint<P, kRanks>& joint, size_t ranks,
                                              DType dtype, CudaStream stream, int all_sms) {
    const bool has_local_pass =
        std::any_of(joint.args, joint.args + ranks, [](const CombineArgs& a) { return a.sums; });
    with_type(dtype, [&]<class T>() {
        if (has_local_pass) {
            using L = LocalJoint<CombineArgs, kRanks>;
            launch(kernels::local_pass_of_combine_kernel<T, kWeighted, L>,
                   local_joint<kRanks>(joint.args, joint.ranks, ranks, all_sms), ranks, stream,
                   false);
        }
        launch(kernels::combine_kernel<T, kWeighted, CombineJoint<P, kRanks>>, joint, ranks,
               stream);
    });
}

}  // namespace ep
