#pragma once

// Features of a GPU's architecture, known at compile time. Tests define another EP_ARCHITECTURE.
#if !defined(EP_ARCHITECTURE)
#if defined(__CUDA_ARCH__)
#define EP_ARCHITECTURE __CUDA_ARCH__
#else
#define EP_ARCHITECTURE 900
#endif
#endif

namespace ep {

struct Architecture {
    static constexpr bool kHasCopyEngine = EP_ARCHITECTURE >= 900;  // bulk copies, see bulk.h
    // See launch_dependents in ptx.h. Not tried on later GPUs.
    static constexpr bool kHasEarlyLaunches = EP_ARCHITECTURE == 900;
    static constexpr bool kHasPackedMax = EP_ARCHITECTURE >= 900;
    static constexpr bool kHasFloat8 = EP_ARCHITECTURE >= 890;
    // Rows that a lane adds to a sum at once. Four make ptxas spill 500 bytes for 10.0, 60 for 9.0.
    static constexpr int kRowsAtOnce = EP_ARCHITECTURE == 900 ? 4 : 2;
    // Vectors of a sum of rows in shared memory. Two make it spill 150 bytes for 10.0, 40 for 9.0.
    static constexpr int kVectorsAtOnce = EP_ARCHITECTURE == 900 ? 2 : 1;
};

}  // namespace ep
