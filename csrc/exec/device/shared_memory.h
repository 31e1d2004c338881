#pragma once

#include "core/function.h"

namespace ep {

// The block's shared memory, as large as the launch asked for.
EP_FN char* dynamic_shared_memory() {
    extern __shared__ __align__(128) char shared[];
    return shared;
}

}  // namespace ep
