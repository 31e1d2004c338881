#pragma once

#include <cstdint>

#include "core/function.h"

namespace ep {

// Loads and stores a weight or its gradient, one word of weight_bytes. It is never computed with.
EP_FN uint64_t load_weight(const char* src, int weight_bytes) {
    if (weight_bytes == 8) return *reinterpret_cast<const uint64_t*>(src);
    return weight_bytes == 4 ? *reinterpret_cast<const uint32_t*>(src) : 0;
}
EP_FN void store_weight(char* dst, uint64_t weight, int weight_bytes) {
    if (weight_bytes == 8) {
        *reinterpret_cast<uint64_t*>(dst) = weight;
    } else if (weight_bytes == 4) {
        *reinterpret_cast<uint32_t*>(dst) = static_cast<uint32_t>(weight);
    }
}

}  // namespace ep
