#pragma once

#include <algorithm>
#include <thread>
#include <vector>

#include "router/host_top.h"
#include "router/team.h"

namespace ep::router {

// A Team of one thread: see team.h.
struct HostTeam {
    template <class F>
    void each(int n, F f) {
#pragma GCC ivdep
        for (int i = 0; i < n; ++i) f(i);
    }

    template <class F>
    void once(F f) {
        f();
    }

    template <class R, class F>
    R sum(int n, F f) {
        constexpr int kLanes = 16;  // additions in flight; their order is fixed
        R lanes[kLanes] = {};
        int i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += f(i + lane);
        }
        for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += f(i);
        for (int width = kLanes / 2; width; width /= 2) {
            for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
        }
        return lanes[0];
    }

    template <class R, class F>
    R max(int n, F f) {
        Key<R> largest = to_key(-kInfinity<R>);
        for (int i = 0; i < n; ++i) {
            const R value = f(i);
            const Key<R> key = value == value ? to_key(value) : largest;
            largest = key > largest ? key : largest;
        }
        return from_key<R>(largest);
    }

    template <class K>
    KeyCount<K> count_and_next(const K* keys, int n, K key) {
        K next = kNoKey<K>;
        int count = 0;
        for (int i = 0; i < n; ++i) {
            count += keys[i] == key;
            const K smaller = keys[i] < key ? keys[i] : kNoKey<K>;
            next = smaller > next ? smaller : next;
        }
        return {count, next};
    }

    template <class K, class F>
    void take_top(K* keys, int n, int count, F f) {
        Pick<K> picks[kMaxTopk];
        router::take_top(keys, n, count, picks);
        for (int rank = 0; rank < count; ++rank) f(rank, picks[rank].index);
    }

    void increment(int64_t* counter) { ++*counter; }
};

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
