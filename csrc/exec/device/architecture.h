#pragma once

// What a GPU's architecture has, known when its code is compiled. Tests name another one.
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
    static constexpr bool kHasPackedMax = EP_ARCHITECTURE >= 900;
    static constexpr bool kHasFloat8 = EP_ARCHITECTURE >= 890;
};

}  // namespace ep
