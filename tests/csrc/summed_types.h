#pragma once

#include <bit>
#include <utility>

#include "core/dtypes.h"
#include "half.h"

namespace ep {

// With FEW_TYPES bf16 and fp64 stand for all types that combine sums: a type differs by its
// arithmetic alone, and takes a program ten seconds to compile.
inline DType summed_type(int any) {
#ifdef FEW_TYPES
    return any % 2 ? DType::fp64 : DType::bf16;
#else
    return static_cast<DType>(any);
#endif
}

template <class F>
void with_summed_type(DType dtype, F&& f) {
#ifdef FEW_TYPES
    if (dtype == DType::fp64) return f.template operator()<double>();
    f.template operator()<BFloat16>();
#else
    with_type(dtype, std::forward<F>(f));
#endif
}

inline int size_of(DType dtype) { return dtype == DType::fp64 ? 8 : dtype == DType::fp32 ? 4 : 2; }

// Calls f with the number, rounded, as this type stores it.
template <class F>
void as_stored(DType dtype, double number, F&& f) {
    const auto single = static_cast<float>(number);
    const auto bits = std::bit_cast<uint32_t>(single);
    switch (dtype) {
        case DType::bf16:
            return f(static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
        case DType::fp16:
            return f(static_cast<Half>(single));
        case DType::fp32:
            return f(single);
        case DType::fp64:
            return f(number);
    }
}

}  // namespace ep
