#pragma once

#include <utility>

#include "core/dtypes.h"

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

}  // namespace ep
