#pragma once

#include "launch/cuda/group.inl"

namespace ep {

template <class P, int kRanks, bool kWeighted>
void CombineLaunch<P, kRanks, kWeighted>::run(const CombineJoint<P, kRanks>& joint, size_t ranks,
                                              DType dtype, CudaStream stream,
                                              const Beside& beside) {
    using J = CombineJoint<P, kRanks>;
    const bool has_local_pass =
        std::any_of(joint.args, joint.args + ranks, [](const CombineArgs& a) { return a.sums; });
    with_type(dtype, [&]<class T>() {
        if (!has_local_pass)
            return launch(kernels::combine_kernel<T, kWeighted, J>, joint, ranks, stream);
        using L = LocalJoint<CombineArgs, kRanks>;
        launch(kernels::local_pass_of_combine_kernel<T, kWeighted, L>,
               local_joint<kRanks>(joint.args, joint.ranks, ranks, beside.all_sms), ranks, stream,
               false);
        // first, or it might find no SM while the exchange waits for it
        J own = joint;
        own.blocks_per_rank = std::max<int>(1, beside.sms / static_cast<int>(ranks));
        launch(kernels::own_sums_kernel<T, kWeighted, J>, own, ranks, beside.fork(stream), false);
        launch(kernels::combine_kernel<T, kWeighted, J>, joint, ranks, stream);
        beside.join(stream);
    });
}

}  // namespace ep
