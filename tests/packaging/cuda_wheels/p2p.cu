#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/fused_dispatch.h"
#include "launch/cuda/low_latency_kernels.h"

// Of every kind of kernel the one that takes most registers.
namespace ep::kernels {

using P = P2pFabricParams;

template __global__ void notify_kernel(const __grid_constant__ NotifyParams<P, 1>);
template __global__ void dispatch_kernel(const __grid_constant__ DispatchParams<P, 1>);
template __global__ void fused_dispatch_kernel(const __grid_constant__ FusedDispatchParams<P, 1>);
template __global__ void own_rows_kernel(const __grid_constant__ DispatchParams<P, 1>);
template __global__ void intra_rank_permute_kernel(const __grid_constant__ DispatchParams<P, 1>);
template __global__ void combine_kernel<BFloat16, true>(
    const __grid_constant__ CombineParams<P, 1>);
template __global__ void intra_rank_reduce_kernel<BFloat16, true>(
    const __grid_constant__ CombineParams<P, 1>);
template __global__ void
low_latency_dispatch_kernel<LowLatencyLaunches::Both, RowKind::Quantized, false>(
    const __grid_constant__ LowLatencyDispatchLaunch<P>);
template __global__ void
low_latency_dispatch_kernel<LowLatencyLaunches::Both, RowKind::Quantized, true>(
    const __grid_constant__ LowLatencyDispatchLaunch<P>);
template __global__ void low_latency_dispatch_kernel<LowLatencyLaunches::Both, RowKind::Flat, true>(
    const __grid_constant__ LowLatencyDispatchLaunch<P>);
template __global__ void low_latency_combine_kernel<LowLatencyLaunches::Both, BFloat16, true>(
    const __grid_constant__ LowLatencyCombineLaunch<P>);

}  // namespace ep::kernels
