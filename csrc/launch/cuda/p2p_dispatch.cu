#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/kernels.h"

namespace ep {

template __global__ void kernels::count_kernel(const __grid_constant__ NotifyJoint<P2pFabric>);
template __global__ void kernels::sum_kernel(const __grid_constant__ NotifyJoint<P2pFabric>);
template __global__ void kernels::exchange_kernel(const __grid_constant__ NotifyJoint<P2pFabric>);
template __global__ void kernels::clear_kernel(const __grid_constant__ DispatchJoint<P2pFabric>);
template __global__ void kernels::dispatch_kernel(const __grid_constant__ DispatchJoint<P2pFabric>);

}  // namespace ep
