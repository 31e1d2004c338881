#pragma once

#include <cstdint>

#include "core/dtypes.h"

namespace ep {

// Rows of numbers to fp8, as core/float8.h has it for bf16.
struct QuantizeArgs {
    int64_t rows;
    int hidden;
    DType dtype;      // bf16, fp16 or fp32
    const void* x;    // [rows, hidden]
    uint8_t* values;  // [rows, hidden], e4m3: x / scale
    float* scales;    // [rows, ceil(hidden / 128)]
};

// The way back: values * scale, in fp32, rounded once.
struct DequantizeArgs {
    int64_t rows;
    int hidden;
    DType dtype;            // bf16, fp16 or fp32
    const uint8_t* values;  // [rows, hidden], e4m3
    const float* scales;    // [rows, ceil(hidden / 128)]
    void* out;              // [rows, hidden]
};

// Enqueued on the stream of the current device. Throw std::runtime_error when the launch fails.
void quantize_cuda(const QuantizeArgs& args, void* stream);
void dequantize_cuda(const DequantizeArgs& args, void* stream);

}  // namespace ep
