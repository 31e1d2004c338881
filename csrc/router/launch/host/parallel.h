#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

namespace ep::router {

// Rows times experts below which further threads cost more than they save: some 100 us of work.
constexpr int64_t kMinElements = 1 << 17;
// Of what a thread takes at once: much less, so that one that gets to run late does little.
constexpr int64_t kElementsAtOnce = 1 << 13;

// A process that was forked has none of OpenMP's threads, and OpenMP would wait for them.
inline const pid_t loaded_by = getpid();

// All or one: OpenMP ends the threads that a smaller team leaves out, and torch's next operator
// would have to start them again.
inline int count_threads(int64_t rows, int experts, int max_threads) {
    return rows * experts < kMinElements || getpid() != loaded_by ? 1 : max_threads;
}

// Calls f(thread, first, last) for pieces of [0, rows), whichever thread is free for the next one.
// They are the threads of torch's operators: those keep their cores for a while when they have
// nothing to do, and others would wait for them.
template <class F>
void in_parallel(int64_t rows, int experts, int threads, F f) {
    const int64_t at_once = std::max<int64_t>(1, kElementsAtOnce / experts);
    std::atomic<int64_t> taken = 0;
    auto work = [&](int thread) {
        int64_t first;
        while ((first = taken.fetch_add(at_once, std::memory_order_relaxed)) < rows)
            f(thread, first, std::min(first + at_once, rows));
    };
#if defined(__SANITIZE_THREAD__)  // does not see how OpenMP's threads wait for each other
    std::vector<std::jthread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
    work(0);
#else
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
#endif
}

}  // namespace ep::router
