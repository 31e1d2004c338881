#pragma once

#include <cstdint>

#include "core/float8.h"
#include "exec/device/architecture.h"
#include "exec/device/ptx.h"

// Conversions of two numbers at once: by an instruction, or the same bits in software.
namespace ep::rows {

// Numbers larger than e4m3 has become its largest.
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
    if constexpr (Architecture::kHasFloat8) {
        return ptx::pack_e4m3(low, high);
    } else {
        return static_cast<uint16_t>(e4m3_of(low) | e4m3_of(high) << 8);
    }
}

// Converts to two fp16, which has room for all of e4m3.
__device__ __forceinline__ uint32_t unpack_e4m3(uint16_t pair) {
    if constexpr (Architecture::kHasFloat8) {
        return ptx::unpack_e4m3(pair);
    } else {
        return ptx::pack_fp16(value_of_e4m3(static_cast<uint8_t>(pair)),
                              value_of_e4m3(static_cast<uint8_t>(pair >> 8)));
    }
}

// The maximum of each half.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
    if constexpr (Architecture::kHasPackedMax) {
        return ptx::max_u16x2(a, b);
    } else {
        const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
        return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
    }
}

}  // namespace ep::rows
