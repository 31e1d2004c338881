#pragma once

namespace ep {

// CUDA's handles, for files that do not include CUDA's headers.
using CudaStream = void*;  // a cudaStream_t
using CudaEvent = void*;   // a cudaEvent_t

}  // namespace ep
