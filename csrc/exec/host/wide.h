#pragma once

// The same loop compiled for wider vectors too, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define EP_WIDE __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define EP_WIDE
#endif

#define EP_INLINE inline __attribute__((always_inline))
