#pragma once

#include "launch/cuda/group.inl"

// In a file of its own because its kernels take the compiler longest: those with weights and those
// without are compiled side by side.
namespace ep {

template <class P>
template <bool kWeighted>
void CudaGroup<P>::launch_combine(const std::vector<CombineArgs>& args, DType dtype,
                                  CudaStream stream) {
    using J = CombineJoint<P>;
    const DeviceGuard guard(device_);
    const J all = joint_of_roles<J>(args);
    with_type(dtype, [&]<class T>() {
        launch(kernels::combine_kernel<T, kWeighted, J>, all, args.size(), stream);
    });
}

}  // namespace ep
