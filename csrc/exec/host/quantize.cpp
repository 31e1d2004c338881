#include <algorithm>
#include <bit>
#include <cstring>

#include "exec/host/rows.h"
#include "exec/host/wide.h"

namespace ep {
namespace {

// GCC's vectors: the compiler maps them to what the machine has.
constexpr size_t kLanes = 8;
using Bytes = uint8_t __attribute__((vector_size(kLanes)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Floats = float __attribute__((vector_size(kLanes * 4)));

EP_INLINE Words e4m3_bits(Floats values) {
    const Words bits = std::bit_cast<Words>(values);
    const Words all = bits & 0x7fffffff;
    const Words magnitude = all < kLargestE4m3Bits ? all : Words{} + kLargestE4m3Bits;
    const Words normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    // adding 2^14 leaves the rounded multiple of 2^-9 in the low bits
    const Words subnormal =
        std::bit_cast<Words>(std::bit_cast<Floats>(magnitude) + 0x1p14f) - 0x46800000;
    const Words finite =
        (magnitude < kSmallestNormalE4m3Bits ? subnormal : normal) | (bits >> 24 & 0x80);
    return all > kInfinityBits ? Words{} + kNanE4m3 : finite;
}

// Bits without the sign order like the magnitudes, NaN last.
EP_INLINE float largest_of(const BFloat16* x, size_t count) {
    uint16_t largest = 0;
    for (size_t i = 0; i < count; ++i) largest = std::max<uint16_t>(largest, x[i].bits & 0x7fff);
    return std::bit_cast<float>(static_cast<uint32_t>(largest) << 16);
}

// count: at most kLanes.
EP_INLINE void quantize_vector(uint8_t* values, const BFloat16* x, size_t count, float scale) {
    Halves halves{};
    std::memcpy(&halves, x, count * sizeof(*x));
    const Words bits = __builtin_convertvector(halves, Words) << 16;
    const Bytes bytes =
        __builtin_convertvector(e4m3_bits(std::bit_cast<Floats>(bits) / scale), Bytes);
    std::memcpy(values, &bytes, count);
}

}  // namespace

uint8_t to_e4m3(float value) { return static_cast<uint8_t>(e4m3_bits(Floats{value})[0]); }

EP_WIDE void quantize_row(uint8_t* values, char* scales, const BFloat16* row, size_t count,
                          ScaleFormat format) {
    for (size_t first = 0; first < count; first += kScaleBlock) {
        const size_t size = std::min<size_t>(kScaleBlock, count - first);
        const BFloat16* x = row + first;
        uint8_t* out = values + first;
        const float scale = scale_of(largest_of(x, size), format);
        size_t i = 0;
        for (; i + kLanes <= size; i += kLanes) quantize_vector(out + i, x + i, kLanes, scale);
        if (i < size) quantize_vector(out + i, x + i, size - i, scale);
        store_scale(scales + first / kScaleBlock * scale_bytes(format), scale, format);
    }
}

}  // namespace ep
