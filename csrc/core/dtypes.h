#pragma once

#include <cstdint>
#include <type_traits>

namespace ep {

// Element types that combine can sum. Dispatch moves bytes of any type.
enum class DType : int { bf16 = 0, fp16 = 1, fp32 = 2, fp64 = 3 };

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// The type of sums of T, and of their weights.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f.operator()<T>() with the element type T that dtype names.
template <class F>
void with_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::bf16:
            return f.template operator()<BFloat16>();
        case DType::fp16:
            return f.template operator()<Float16>();
        case DType::fp32:
            return f.template operator()<float>();
        case DType::fp64:
            return f.template operator()<double>();
    }
}

}  // namespace ep
