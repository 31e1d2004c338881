#pragma once

// Numbers as the router sees them: storage types to real (float or double) and back, keys that
// order like the reals, exp and sigmoid. Host loops over these vectorise: no branches, no tables.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/dtypes.h"
#include "core/function.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace ep::router {

template <class R>
constexpr R kInfinity = std::numeric_limits<R>::infinity();

template <class To, class From>
EP_FN To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

// ---- storage types

template <class Storage>
struct RealOf {
    using type = float;
};
template <>
struct RealOf<double> {
    using type = double;
};
template <class Storage>
using Real = typename RealOf<Storage>::type;

EP_FN float to_real(float value) { return value; }
EP_FN double to_real(double value) { return value; }
EP_FN float to_real(BFloat16 value) { return bits_as<float>(uint32_t{value.bits} << 16); }

EP_FN float to_real(Float16 value) {
#if defined(__CUDACC__)
    return __half2float(__ushort_as_half(value.bits));
#else
    const uint32_t magnitude = value.bits & 0x7fffu;
    // 2^112 moves the exponent's bias from 15 to 127, and makes subnormal halves normal.
    const uint32_t finite = bits_as<uint32_t>(bits_as<float>(magnitude << 13) * 0x1p112f);
    const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    return bits_as<float>(finite | special | (value.bits & 0x8000u) << 16);
#endif
}

// Round to nearest, ties to even.
EP_FN void from_real(float value, float& to) { to = value; }
EP_FN void from_real(double value, double& to) { to = value; }

EP_FN void from_real(float value, BFloat16& to) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    to.bits = static_cast<uint16_t>(value == value ? rounded : bits >> 16 | 0x40u);
}

EP_FN void from_real(float value, Float16& to) {
#if defined(__CUDACC__)
    to.bits = __half_as_ushort(__float2half_rn(value));
#else
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + (magnitude >> 13 & 1u) + 0xfffu - (112u << 23)) >> 13;
    // Adding 0.5 makes the addition round at 2^-24, the unit of subnormal halves.
    const uint32_t subnormal =
        bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
    half = magnitude >= 0x47800000u ? special : half;              // 2^16 and more, NaN
    to.bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
#endif
}

// ---- keys: integers in the order of the reals, -0 equal to +0, NaN above +inf

template <class R>
struct KeyOf;
template <>
struct KeyOf<float> {
    using type = int32_t;
};
template <>
struct KeyOf<double> {
    using type = int64_t;
};
template <class R>
using Key = typename KeyOf<R>::type;

template <class K>
constexpr K kNoKey = std::numeric_limits<K>::min();  // below the key of every real
template <class K>
constexpr K kNanKey = std::numeric_limits<K>::max();

template <class K>
constexpr K kAllButSign = std::numeric_limits<K>::max();

// Negative reals have their magnitude's bits flipped; doing so twice undoes it.
template <class K>
EP_FN K flip_negative(K bits) {
    return bits ^ (bits >> (8 * sizeof(K) - 1) & kAllButSign<K>);
}

template <class R>
EP_FN Key<R> to_key(R value) {
    const Key<R> key = flip_negative(bits_as<Key<R>>(value + R(0)));
    return value == value ? key : kNanKey<Key<R>>;
}

template <class R>
EP_FN R from_key(Key<R> key) {
    return bits_as<R>(flip_negative(key));
}

// ---- functions

EP_FN double exponential(double x) { return exp(x); }

// On the host within 1.1 ulp of exp(x), subnormal results included, and the same to the bit on
// every machine.
EP_FN float exponential(float x) {
#if defined(__CUDACC__)
    return expf(x);
#else
    x = x < -104.0f ? -104.0f : x;  // exp(-104) rounds to 0
    x = x > 89.0f ? 89.0f : x;      // exp(89) overflows to infinity
    // x = n ln 2 + r, |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer, which is then in the
    // sum's low bits.
    const float shifted = x * 1.44269504f + 0x1.8p23f;
    const float n = shifted - 0x1.8p23f;
    // ln 2 in two parts (Cody and Waite): n * 355/512 is exact.
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float q = 1.0f / 5040;  // Taylor: the next term is below 2^-27 of the result
    q = q * r + 1.0f / 720;
    q = q * r + 1.0f / 120;
    q = q * r + 1.0f / 24;
    q = q * r + 1.0f / 6;
    q = q * r + 0.5f;
    const float exp_r = (q * r * r + r) + 1.0f;
    // 2^n in two factors, so that neither leaves the range of normal numbers.
    const int32_t exponent = bits_as<int32_t>(shifted) - bits_as<int32_t>(0x1.8p23f);
    const int32_t half = exponent >> 1;
    const float low = bits_as<float>(static_cast<uint32_t>(half + 127) << 23);
    const float high = bits_as<float>(static_cast<uint32_t>(exponent - half + 127) << 23);
    return exp_r * low * high;
#endif
}

// torch's formula, so that its roundings, which can decide a choice, are mostly torch's as well. 0
// below -88.8 in fp32.
template <class R>
EP_FN R sigmoid(R x) {
    return R(1) / (R(1) + exponential(-x));
}

}  // namespace ep::router
