#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/function.h"

namespace ep {

// Rows as fp8, with a scale for each kScaleBlock elements (fewer at a row's end):
// value = x / scale in fp32, then fp8, both rounded to nearest even; larger ones become the largest
// of the format. megatron_ep/reference.py is the specification.
constexpr int kScaleBlock = 128;
enum class ValueFormat : int { E4m3, E5m2 };
constexpr float kLargestE4m3 = 448, kLargestE5m2 = 57344;
constexpr uint8_t kNanE4m3 = 0x7f;
// Bits of fp32: infinity, and the smallest and the largest number that is normal in e4m3.
constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kSmallestNormalE4m3Bits = 0x3c800000;  // 2^-6
constexpr uint32_t kLargestE4m3Bits = 0x43e00000;         // 448
constexpr uint32_t kLargestE5m2Bits = 0x47600000;         // 57344

// A block's scale is its largest |x| divided by the format's largest value, rounded and stored as:
//   Fp32      fp32; 1 for a block of zeros
//   PowerOf2  the next power of two that is not smaller, and at least 2^-126, as fp32
//   Ue8m0     the exponent byte of PowerOf2
// A block with an infinity or NaN has NaN for its scale and all its values.
enum class ScaleFormat : int { None, Fp32, PowerOf2, Ue8m0 };

EP_HD int scale_bytes(ScaleFormat format) { return format == ScaleFormat::Ue8m0 ? 1 : 4; }
EP_HD int scale_blocks(size_t elements) {
    return static_cast<int>((elements + kScaleBlock - 1) / kScaleBlock);
}

// largest: of |x| in the block; infinity or NaN if it has one.
EP_HD float scale_of(float largest, ScaleFormat format, float largest_value = kLargestE4m3) {
    constexpr uint32_t kFraction = 0x007fffff, kNan = 0x7fffffff;
    const float quotient = largest / largest_value;
    uint32_t bits = std::bit_cast<uint32_t>(quotient == 0 ? 1.0f : quotient);
    if (bits >= kInfinityBits) {
        bits = kNan;
    } else if (format != ScaleFormat::Fp32) {
        bits = (bits + kFraction) & kInfinityBits;
    }
    return std::bit_cast<float>(bits);
}

// Rounds to nearest even in a format of 8 bits; numbers over the largest become the largest.
// kFraction: bits behind the point. kBias: of the exponent. kLargest: as bits of fp32.
template <int kFraction, int kBias, uint32_t kLargest>
EP_HD uint8_t float8_of(float value) {
    constexpr int kShift = 23 - kFraction;
    constexpr uint32_t kExponent = 127 - kBias, kHalf = (1u << (kShift - 1)) - 1;
    // adding this power of two leaves the rounded multiple of the smallest number in the low bits
    constexpr uint32_t kLift = (kExponent + 1 + kShift) << 23;
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t all = bits & 0x7fffffff, magnitude = all < kLargest ? all : kLargest;
    if (all > kInfinityBits) return 0x7f;
    const uint32_t rounded =
        magnitude < ((kExponent + 1) << 23)
            ? std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) +
                                      std::bit_cast<float>(kLift)) -
                  kLift
            : (magnitude - (kExponent << 23) + kHalf + (magnitude >> kShift & 1)) >> kShift;
    return static_cast<uint8_t>(rounded | (bits >> 24 & 0x80));
}

// exec/host/quantize.cpp has it for vectors.
EP_HD uint8_t e4m3_of(float value) { return float8_of<3, 7, kLargestE4m3Bits>(value); }
EP_HD uint8_t e5m2_of(float value) { return float8_of<2, 15, kLargestE5m2Bits>(value); }

EP_HD float value_of_e4m3(uint8_t value) {
    const uint32_t magnitude = value & 0x7f, sign = static_cast<uint32_t>(value & 0x80) << 24;
    if (magnitude == kNanE4m3) return std::bit_cast<float>(0x7fffffffu);
    const float finite = std::bit_cast<float>(magnitude << 20) * 0x1p120f;  // for the exponent bias
    return std::bit_cast<float>(std::bit_cast<uint32_t>(finite) | sign);
}

EP_HD uint8_t ue8m0(float scale) {
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(scale) >> 23);
}

EP_HD void store_scale(char* dst, float scale, ScaleFormat format) {
    if (format == ScaleFormat::Ue8m0) {
        *reinterpret_cast<uint8_t*>(dst) = ue8m0(scale);
    } else {
        *reinterpret_cast<float*>(dst) = scale;
    }
}

}  // namespace ep
