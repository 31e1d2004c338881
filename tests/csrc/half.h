#pragma once

// IEEE's number of 16 bits, for which g++ 12 has one name on x86-64 and another on Arm.
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif
