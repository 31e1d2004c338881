#pragma once

// Every .cpp of the router includes this first: functions that were compiled with other options are
// not inlined.
//
// No contraction to fused multiply-adds: every clone and machine computes the same bits, and so
// makes the same choices. No trapping math: the floating-point exception flags are not read, and
// keeping them would prevent vectorization.
#pragma GCC optimize("fp-contract=off", "no-trapping-math")

// Compiles for AVX-512 and AVX2 besides the baseline, chosen when the library is loaded; "flatten"
// carries the choice into all that is called. Not under ThreadSanitizer, whose runtime is not
// initialized at that moment.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define EP_ROUTER_CLONES \
    __attribute__((target_clones("arch=x86-64-v4", "avx2", "default"), flatten))
#else
#define EP_ROUTER_CLONES __attribute__((flatten))
#endif
