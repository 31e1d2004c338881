#pragma once

// A protocol is compiled twice: by the host compiler for HostWarp and by nvcc for DeviceWarp. EP_FN
// marks code that runs on a warp of either kind, EP_HD code that a CUDA launch also calls on the
// host.
#if defined(__CUDACC__)
#define EP_FN __device__ __forceinline__
#define EP_HD __host__ __device__ inline
#else
#define EP_FN inline
#define EP_HD inline
#endif
