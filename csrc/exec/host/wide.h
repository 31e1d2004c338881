#pragma once

// EP_WIDE compiles a function for wider vectors too, chosen when the library is loaded. EP_WIDEST
// compiles it for the widest alone, which machines have if kHasWidest.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define EP_WIDE __attribute__((target_clones("arch=x86-64-v3", "default")))
#define EP_WIDEST __attribute__((target("arch=x86-64-v4")))
inline const bool kHasWidest = __builtin_cpu_supports("x86-64-v4");
#else
#define EP_WIDE
#define EP_WIDEST
constexpr bool kHasWidest = false;
#endif

// Inlined, because vectors have no calling convention that all of these targets share.
#define EP_INLINED __attribute__((always_inline))
#define EP_INLINE inline EP_INLINED
