// Quantization of rows to fp8 on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtypes.h"
#include "core/float8.h"

namespace ep {

// Rounds to nearest even; larger numbers become 448.
uint8_t to_e4m3(float value);

// Quantizes a row as core/float8.h specifies: `count` values, and the scales of their blocks.
void quantize_row(uint8_t* values, char* scales, const BFloat16* row, size_t count,
                  ScaleFormat format);

}  // namespace ep
