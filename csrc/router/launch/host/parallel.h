#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace ep::router {

// Rows times experts below which a further thread costs more than it saves: some 50 us of work.
constexpr int64_t kMinElementsPerThread = 1 << 16;

inline int count_parts(int64_t rows, int experts, int max_threads) {
    const int64_t worthwhile = rows * experts / kMinElementsPerThread;
    return static_cast<int>(
        std::max<int64_t>(1, std::min<int64_t>({worthwhile, rows, max_threads})));
}

// Calls f(part, first, last) for contiguous parts of [0, rows), a thread each, the first on the
// caller's.
template <class F>
void in_parallel(int64_t rows, int parts, F f) {
    std::vector<std::jthread> threads;
    for (int part = 1; part < parts; ++part)
        threads.emplace_back(f, part, rows * part / parts, rows * (part + 1) / parts);
    f(0, int64_t{0}, rows / parts);
}

}  // namespace ep::router
