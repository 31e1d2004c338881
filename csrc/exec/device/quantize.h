#pragma once

#include <cstdint>

#include "core/float8.h"
#include "exec/device/architecture.h"
#include "exec/device/ptx.h"
#include "exec/device/rows.h"

// Quantizes rows of bf16 to fp8, as core/float8.h specifies.
namespace ep::rows {

// Conversions of two numbers at once: by an instruction, or the same bits in software.
// Numbers larger than e4m3 has become its largest.
EP_FN uint16_t pack_e4m3(float low, float high) {
    if constexpr (Architecture::kHasFloat8) {
        return ptx::pack_e4m3(low, high);
    } else {
        return static_cast<uint16_t>(e4m3_of(low) | e4m3_of(high) << 8);
    }
}

EP_FN uint16_t pack_e5m2(float low, float high) {
    if constexpr (Architecture::kHasFloat8) {
        return ptx::pack_e5m2(low, high);
    } else {
        return static_cast<uint16_t>(e5m2_of(low) | e5m2_of(high) << 8);
    }
}

// Converts to two fp16, of which an e5m2 is the upper byte.
EP_FN uint32_t unpack_e5m2(uint16_t pair) { return (pair & 0xffu) << 8 | (pair & 0xff00u) << 16; }

// Converts to two fp16, which has room for all of e4m3.
EP_FN uint32_t unpack_e4m3(uint16_t pair) {
    if constexpr (Architecture::kHasFloat8) {
        return ptx::unpack_e4m3(pair);
    } else {
        return ptx::pack_fp16(value_of_e4m3(static_cast<uint8_t>(pair)),
                              value_of_e4m3(static_cast<uint8_t>(pair >> 8)));
    }
}

// The maximum of each half.
EP_FN uint32_t max_u16x2(uint32_t a, uint32_t b) {
    if constexpr (Architecture::kHasPackedMax) {
        return ptx::max_u16x2(a, b);
    } else {
        const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
        return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
    }
}

// x / scale, rounded to nearest even, for all bf16 x of a block: a product with the reciprocal and
// a Newton step that makes it exact, signs of zeros included.
struct Divider {
    float scale, inverse;
    float lift;  // factor of both sides if the scale is too small for a reciprocal

    EP_FN explicit Divider(float of) {
        lift = of < 0x1p-60f ? 0x1p64f : 1.0f;
        scale = of * lift;
        inverse = __frcp_rn(scale);
    }
    EP_FN float operator()(float x) const {
        const float lifted = __fmul_rn(x, lift);
        const float quotient = __fmul_rn(lifted, inverse);
        const float excess = __fmaf_rn(quotient, scale, -lifted);
        return __fmaf_rn(-excess, inverse, quotient);
    }
};

EP_FN float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
EP_FN float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Bits without the sign order like the magnitudes, NaN last.
EP_FN uint32_t magnitudes(uint32_t pair) { return pair & 0x7fff7fffu; }
EP_FN float larger_of(uint32_t magnitude_pair) {
    return bf16_high(max_u16x2(magnitude_pair, magnitude_pair << 16));
}

EP_FN uint32_t quantize_four(const Divider& divided, uint32_t a, uint32_t b) {
    return pack_e4m3(divided(bf16_low(a)), divided(bf16_high(a))) |
           static_cast<uint32_t>(pack_e4m3(divided(bf16_low(b)), divided(bf16_high(b)))) << 16;
}

// Each lane has a vector of 8 elements, so a block has 16 lanes, and several vectors are in flight.
// A lane keeps the scale of one block.
constexpr int kElements = 8, kBlockLanes = kScaleBlock / kElements, kVectors = 7;
EP_FN uint32_t block_of_lane() { return 2 * (lane_id() % kBlockLanes) + lane_id() / kBlockLanes; }

// Quantizes a part of a row in shared memory, at most 32 blocks, in place: its first half then
// holds the values. Returns each lane's scale. count is a multiple of 8.

EP_FN float quantize_shared(char* row, uint32_t count, ScaleFormat format) {
    float own_scale = 0;
    for (uint32_t first = 0; first < count; first += 32 * kElements * kVectors) {
        uint4 in[kVectors];
        uint32_t largest[kVectors];
        auto element = [&](int i) { return first + kElements * (32 * i + lane_id()); };
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            in[i] = element(i) < count ? ptx::load_shared(row + 2 * element(i)) : uint4{};
            largest[i] = max_u16x2(max_u16x2(magnitudes(in[i].x), magnitudes(in[i].y)),
                                   max_u16x2(magnitudes(in[i].z), magnitudes(in[i].w)));
        }
#pragma unroll
        for (int distance = kBlockLanes / 2; distance; distance /= 2) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i)
                largest[i] =
                    max_u16x2(largest[i], __shfl_xor_sync(kAllLanes, largest[i], distance));
        }
        __syncwarp();  // all have read what is overwritten now
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const float scale = scale_of(larger_of(largest[i]), format);
            const Divider divided(scale);
            const uint2 out = {quantize_four(divided, in[i].x, in[i].y),
                               quantize_four(divided, in[i].z, in[i].w)};
            if (element(i) < count) ptx::store_shared(row + element(i), out);
            const uint32_t pair = first / (32 * kElements) + i;  // of a pair of blocks
            if (lane_id() % kBlockLanes == pair) own_scale = scale;
        }
    }
    return own_scale;
}

// Stores scales of quantize_shared, `count` blocks from `first` on, for each lane in the mask.
EP_FN void store_scales(void* own_dst, uint32_t mask, float own_scale, uint32_t first,
                        uint32_t count, ScaleFormat format) {
    for_each_lane(mask, [&](int lane) {
        char* dst = static_cast<char*>(shuffle_pointer(own_dst, lane));
        if (block_of_lane() < count)
            store_scale(dst + (first + block_of_lane()) * scale_bytes(format), own_scale, format);
    });
}

// Quantizes a row that is short or not aligned to 16 bytes. The destination of each lane in the
// mask gets the values and, scales_at bytes further, the scales.
__device__ __noinline__ inline void quantize_elements(void* own_dst, uint32_t mask, const void* src,
                                                      uint32_t count, uint32_t scales_at,
                                                      ScaleFormat format) {
    constexpr int kElements = kScaleBlock / 32;  // per lane
    const uint16_t* x = static_cast<const uint16_t*>(src);
    for (uint32_t first = 0; first < count; first += kScaleBlock) {
        uint32_t in[kElements];
        uint32_t largest = 0;
        auto element = [&](int i) { return first + 32 * i + lane_id(); };
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            in[i] = element(i) < count ? x[element(i)] : 0;
            largest = max_u16x2(largest, magnitudes(in[i]));
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2)
            largest = max_u16x2(largest, __shfl_xor_sync(kAllLanes, largest, distance));
        const float scale = scale_of(larger_of(largest), format);
        const Divider divided(scale);
        const uint32_t out = quantize_four(divided, in[0] | in[1] << 16, in[2] | in[3] << 16);
        for_each_lane(mask, [&](int lane) {
            char* dst = static_cast<char*>(shuffle_pointer(own_dst, lane));
#pragma unroll
            for (int i = 0; i < kElements; ++i) {
                if (element(i) < count) dst[element(i)] = static_cast<char>(out >> 8 * i);
            }
            if (lane_id() == 0)
                store_scale(dst + scales_at + first / kScaleBlock * scale_bytes(format), scale,
                            format);
        });
    }
}

}  // namespace ep::rows
