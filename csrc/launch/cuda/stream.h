#pragma once

namespace ep {

// For those who do not include CUDA's headers.
using CudaStream = void*;  // a cudaStream_t
using CudaEvent = void*;   // a cudaEvent_t

}  // namespace ep
