#include "exec/host/quantize.h"

#include <algorithm>
#include <bit>

#include "exec/host/wide.h"

namespace ep {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

// No branches: the loop over a block's elements becomes vectors.
EP_INLINE uint32_t e4m3_bits(float value) {
    constexpr uint32_t kSmallestNormal = 0x3c800000;  // 2^-6
    constexpr uint32_t kLargest = 0x43e00000;         // 448
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t all = bits & kMagnitude;
    const uint32_t magnitude = all < kLargest ? all : kLargest;
    const uint32_t normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    // adding 2^14 leaves the rounded multiple of 2^-9 in the low bits
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000;
    const uint32_t finite = magnitude < kSmallestNormal ? subnormal : normal;
    return all > kInfinity ? kNanE4m3 : finite | (bits >> 24 & 0x80);
}

EP_INLINE float widen(BFloat16 value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Bits without their sign are in the order of what they stand for, NaN last.
EP_INLINE float largest_of(const BFloat16* x, size_t count) {
    uint16_t largest = 0;
    for (size_t i = 0; i < count; ++i) largest = std::max<uint16_t>(largest, x[i].bits & 0x7fff);
    return widen({largest});
}

}  // namespace

uint8_t to_e4m3(float value) { return static_cast<uint8_t>(e4m3_bits(value)); }

EP_WIDE void quantize_row(uint8_t* values, char* scales, const BFloat16* row, size_t count,
                          ScaleFormat format) {
    for (size_t first = 0; first < count; first += kScaleBlock) {
        const size_t size = std::min<size_t>(kScaleBlock, count - first);
        const BFloat16* x = row + first;
        uint8_t* out = values + first;
        const float scale = scale_of(largest_of(x, size), format);
        for (size_t i = 0; i < size; ++i) out[i] = e4m3_bits(widen(x[i]) / scale);
        store_scale(scales + first / kScaleBlock * scale_bytes(format), scale, format);
    }
}

}  // namespace ep
