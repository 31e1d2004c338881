#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtypes.h"
#include "core/float8.h"

namespace ep {

// The loops that decide the host's bandwidth.

// Copies to where it is not read again soon, past the cache, which is left to the rings.
void copy_streaming(void* dst, const void* src, size_t bytes);
// Orders such copies before what this thread writes next. Other copies need no such call.
void finish_streaming();

// dst[i] = rows[0][i] + rows[1][i] + ..., in this order, in fp32 (fp64 for double); 0 without rows.
template <class T>
void sum_rows(T* dst, const T* const* rows, int num_rows, size_t count);

// dst[i] = weights[0] * rows[0][i] + weights[1] * rows[1][i] + ..., each product rounded before it
// is added.
template <class T>
void weighted_sum_rows(T* dst, const T* const* rows, const Accumulator<T>* weights, int num_rows,
                       size_t count);

// Rounds to nearest even; larger numbers become 448.
uint8_t to_e4m3(float value);

// Quantizes a row as core/float8.h specifies: `count` values, and the scales of their blocks.
void quantize_row(uint8_t* values, char* scales, const BFloat16* row, size_t count,
                  ScaleFormat format);

}  // namespace ep
