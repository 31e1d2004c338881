#pragma once

// Just enough of CUDA to run the kernels' own source on the host: every lane of a grid is a fiber,
// and a seed picks which one runs next. A collective of a warp waits for its 32 lanes, and lanes
// that meet at different ones, or not at all, end the program. What the copy engine does happens as
// late as its waits allow, so that a missing wait shows. What no rule orders ends the program, too:
// see order.h.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct uint2 {
    unsigned x, y;
};

namespace simt {

struct Index {
    unsigned x;
};

// Of what runs now, for die.
inline uint64_t seed = 0;
[[noreturn]] void die(const char* what);

// Runs kernel() once for each thread of the grid, until all have returned. A rank has as many of
// the blocks as any other, one after the other.
void run(unsigned ranks, unsigned blocks_per_rank, unsigned threads, uint64_t seed,
         const std::function<void()>& kernel);
// The same for launches of so many ranks that happen to be on their GPUs at the same time: a grid
// of `blocks` for each.
void run_at_once(const std::vector<std::function<void()>>& kernels, unsigned blocks,
                 unsigned threads, uint64_t seed);

// Two launches at the same time, each of so many blocks for a rank.
void run_beside(unsigned ranks, unsigned blocks, const std::function<void()>& kernel,
                unsigned more_blocks, const std::function<void()>& another, unsigned threads,
                uint64_t seed);

// What goes on beside the kernel, a step at a time.
inline std::function<void()> background;

// Lets other lanes run: for a loop that waits for one of them without a collective.
void yield();

// All lanes of the block.
void meet();
// By one lane of the block, once: no lane of it waits for another rank any more.
void launch_dependents();
void may_wait_for_others();

Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
char* block_memory();  // shared memory of the current block

// The 32 values that the lanes of the current warp bring to their next collective, which must be of
// the same kind; until it meets the one after.
enum class Kind { Sync, Ballot, Shuffle, ShuffleUp, Match, Reduce };
const std::array<uint64_t, 32>& exchange(Kind kind, uint64_t value);

bool in_lane();         // a thread of the grid is running
unsigned warp_index();  // among those of all grids
// How often the lanes of the current one have met at a collective.
uint64_t meetings();
inline unsigned lane() { return thread_index().x % 32; }

template <class T>
uint64_t to_word(T value) {
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(value));
    return word;
}
template <class T>
T from_word(uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
}

}  // namespace simt

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())

inline void __syncwarp() { simt::exchange(simt::Kind::Sync, 0); }
inline void __syncthreads() { simt::meet(); }

inline unsigned __ballot_sync(unsigned, bool value) {
    unsigned mask = 0;
    const auto& values = simt::exchange(simt::Kind::Ballot, value);
    for (unsigned i = 0; i < 32; ++i) mask |= static_cast<unsigned>(values[i] != 0) << i;
    return mask;
}
inline bool __all_sync(unsigned mask, bool value) {
    return __ballot_sync(mask, value) == 0xffffffffu;
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return simt::from_word<T>(simt::exchange(simt::Kind::Shuffle, simt::to_word(value))[lane]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
    const auto& values = simt::exchange(simt::Kind::ShuffleUp, simt::to_word(value));
    const int source = static_cast<int>(simt::lane()) - distance;
    return source < 0 ? value : simt::from_word<T>(values[source]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return __shfl_sync(mask, value, static_cast<int>(simt::lane()) ^ distance);
}
inline unsigned __match_any_sync(unsigned, int value) {
    const auto& values = simt::exchange(simt::Kind::Match, simt::to_word(value));
    unsigned mask = 0;
    for (unsigned i = 0; i < 32; ++i)
        mask |= static_cast<unsigned>(values[i] == simt::to_word(value)) << i;
    return mask;
}
template <class T, class F>
T reduce(T value, F&& join) {
    const auto& values = simt::exchange(simt::Kind::Reduce, simt::to_word(value));
    return std::accumulate(
        values.begin() + 1, values.end(), simt::from_word<T>(values[0]),
        [&](T all, uint64_t other) { return join(all, simt::from_word<T>(other)); });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) { return reduce(value, std::bit_or()); }
inline int __reduce_add_sync(unsigned, int value) { return reduce(value, std::plus()); }
inline int __reduce_max_sync(unsigned, int value) {
    return reduce(value, [](int a, int b) { return std::max(a, b); });
}
inline int __reduce_min_sync(unsigned, int value) {
    return reduce(value, [](int a, int b) { return std::min(a, b); });
}
inline void atomicAdd(unsigned long long* counter, unsigned long long value) { *counter += value; }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
// Products that never become part of a fused operation.
__attribute__((noinline)) inline float __fmul_rn(float a, float b) { return a * b; }
__attribute__((noinline)) inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float value) { return 1 / value; }
