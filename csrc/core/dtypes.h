#pragma once

#include <cstdint>
#include <type_traits>

namespace ep {

// Element types that combine can sum. Dispatch moves bytes and does not care.
enum class DType : int { bf16 = 0, fp16 = 1, fp32 = 2, fp64 = 3 };

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// In what sums of T run, and what their weights are.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace ep
