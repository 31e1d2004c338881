#pragma once

namespace ep {

using CudaStream = void*;  // a cudaStream_t, for those who do not include CUDA's headers

}  // namespace ep
