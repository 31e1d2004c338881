#include "launch/cuda/quantize_kernels.h"
#include "router/kernels.h"

// What needs no other rank, for each type that is converted in its own way.
namespace ep {

template __global__ void quantize_kernel<BFloat16, true>(const QuantizeArgs, int);
template __global__ void quantize_kernel<Float16, false>(const QuantizeArgs, int);
template __global__ void dequantize_kernel<BFloat16, true>(const QuantizeArgs, int);
template __global__ void dequantize_kernel<Float16, false>(const QuantizeArgs, int);

namespace router {

template __global__ void router_forward<BFloat16>(const RouterConfig, const RouterForward,
                                                  const int);
template __global__ void router_forward<Float16>(const RouterConfig, const RouterForward,
                                                 const int);
template __global__ void router_forward<double>(const RouterConfig, const RouterForward, const int);
template __global__ void router_backward<BFloat16>(const RouterConfig, const RouterBackward,
                                                   const int);
template __global__ void router_backward<Float16>(const RouterConfig, const RouterBackward,
                                                  const int);
template __global__ void router_backward<double>(const RouterConfig, const RouterBackward,
                                                 const int);

}  // namespace router
}  // namespace ep
