#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/kernels.h"

namespace ep {

template __global__ void kernels::combine_kernel<BFloat16>(const __grid_constant__ CombineJoint<P2pFabric>);
template __global__ void kernels::combine_kernel<Float16>(const __grid_constant__ CombineJoint<P2pFabric>);
template __global__ void kernels::combine_kernel<float>(const __grid_constant__ CombineJoint<P2pFabric>);
template __global__ void kernels::combine_kernel<double>(const __grid_constant__ CombineJoint<P2pFabric>);

}  // namespace ep
