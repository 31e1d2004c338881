#pragma once

#include <cstdint>

#include "core/row.h"
#include "router/number.h"
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

    // Up to two, as in most models, take one pass: the two largest of each lane, then of all lanes.
    template <class R>
    R sum_top(const Key<R>* keys, int n, int count) {
        if (count > 2) return sum_top_by_counting<R>(*this, keys, n, count);
        constexpr int kLanes = 16;
        Key<R> first[kLanes], second[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) first[lane] = second[lane] = kNoKey<Key<R>>;
        auto enter = [&](int lane, Key<R> key, Key<R> other) {
            const Key<R> lower = first[lane] < key ? first[lane] : key;
            first[lane] = first[lane] < key ? key : first[lane];
            second[lane] = second[lane] < lower ? lower : second[lane];
            second[lane] = second[lane] < other ? other : second[lane];
        };
        int i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) enter(lane, keys[i + lane], kNoKey<Key<R>>);
        }
        for (int lane = 0; i < n; ++i, ++lane) enter(lane, keys[i], kNoKey<Key<R>>);
        for (int width = kLanes / 2; width; width /= 2) {
            for (int lane = 0; lane < width; ++lane)
                enter(lane, first[lane + width], second[lane + width]);
        }
        R sum = 0;
        sum += from_key<R>(first[0]);
        if (count == 2) sum += from_key<R>(second[0]);
        return sum;
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
        struct {
            K key;
            int index;
        } best[kMaxTopk];
        int found = 0;
        for (int i = 0; i < n; ++i) {
            if (found == count && keys[i] <= best[count - 1].key) continue;
            int place = found < count ? found++ : count - 1;
            for (; place > 0 && best[place - 1].key < keys[i]; --place)
                best[place] = best[place - 1];
            best[place] = {keys[i], i};
        }
        for (int rank = 0; rank < count; ++rank) {
            keys[best[rank].index] = kNoKey<K>;
            f(rank, best[rank].index);
        }
    }

    void increment(int64_t* counter) { ++*counter; }
};

}  // namespace ep::router
