#pragma once

#include <cstdint>

#include "core/dtypes.h"
#include "core/float8.h"

namespace ep {

// Arguments for converting rows to fp8, by the rules of core/float8.h, and back: reals = values *
// scale, computed in fp32 and rounded once.
struct QuantizeArgs {
    int64_t rows;
    int hidden;
    DType dtype;      // bf16, fp16 or fp32
    void* reals;      // [rows, hidden]
    uint8_t* values;  // [rows, hidden]: reals / scale
    float* scales;    // [rows, ceil(hidden / 128)]
    ValueFormat value_format;
    ScaleFormat scale_format;  // Fp32 or PowerOf2; read by quantize alone
};

// Enqueue on a stream of the current device. Throw std::runtime_error if the launch fails.
void quantize_cuda(const QuantizeArgs& args, void* stream);
void dequantize_cuda(const QuantizeArgs& args, void* stream);

}  // namespace ep
