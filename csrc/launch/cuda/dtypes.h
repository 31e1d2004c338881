#pragma once

#include <stdexcept>

#include "core/dtypes.h"

namespace ep {

// Whether this build has combine kernels for T. Each type adds a full set of kernels, so types that
// are rare in training are built only if MEGATRON_EP_DTYPES names them.
template <class T>
constexpr bool kIsBuilt = true;
#if !defined(MEGATRON_EP_FP16)
template <>
constexpr bool kIsBuilt<Float16> = false;
#endif
#if !defined(MEGATRON_EP_FP64)
template <>
constexpr bool kIsBuilt<double> = false;
#endif

// Does what with_type does. Throws std::invalid_argument for a type that is not built.
template <class F>
void with_built_type(DType dtype, F&& f) {
    with_type(dtype, [&]<class T>() {
        if constexpr (kIsBuilt<T>) {
            f.template operator()<T>();
        } else {
            throw std::invalid_argument(
                "combine was built without this type for GPUs: MEGATRON_EP_DTYPES=all has it");
        }
    });
}

// Calls f.operator()<T>() for each type that is built.
template <class F>
void for_each_built_type(F&& f) {
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32, DType::fp64}) {
        with_type(dtype, [&]<class T>() {
            if constexpr (kIsBuilt<T>) f.template operator()<T>();
        });
    }
}

}  // namespace ep
