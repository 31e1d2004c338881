#pragma once

namespace ep {

// The block's shared memory, as large as the launch asked for.
__device__ __forceinline__ char* dynamic_shared_memory() {
    extern __shared__ __align__(128) char shared[];
    return shared;
}

}  // namespace ep
