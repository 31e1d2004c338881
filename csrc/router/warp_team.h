#pragma once

#include <climits>

#include "router/number.h"
#include "router/team.h"

namespace ep::router {

// A Team of the 32 lanes of a warp: see team.h. Every row is one warp's and its scratch lies
// in shared memory. Lane l works on the elements l, l + 32, ..., so that global accesses coalesce
// and shared ones have no bank conflicts.
struct WarpTeam {
    static constexpr unsigned kAll = 0xffffffffu;
    int lane;

    template <class F>
    __device__ void each(int n, F f) {
#if defined(__CUDACC__)
#pragma unroll 4
#endif
        for (int i = lane; i < n; i += 32) f(i);
        __syncwarp();
    }

    template <class F>
    __device__ void once(F f) {
        if (lane == 0) f();
        __syncwarp();
    }

    template <class R, class F>
    __device__ R sum(int n, F f) {
        R total = 0;
        for (int i = lane; i < n; i += 32) total += f(i);
        for (int distance = 16; distance; distance /= 2)
            total += __shfl_xor_sync(kAll, total, distance);
        return total;
    }

    template <class R, class F>
    __device__ R max(int n, F f) {
        R largest = -kInfinity<R>;
        for (int i = lane; i < n; i += 32) largest = fmax(largest, f(i));
        for (int distance = 16; distance; distance /= 2)
            largest = fmax(largest, __shfl_xor_sync(kAll, largest, distance));
        return largest;
    }

    template <class R>
    __device__ R sum_top(const Key<R>* keys, int n, int count) {
        return sum_top_by_counting<R>(*this, keys, n, count);
    }

    template <class K>
    __device__ KeyCount<K> count_and_next(const K* keys, int n, K key) {
        int count = 0;
        K next = kNoKey<K>;
        for (int i = lane; i < n; i += 32) {
            count += keys[i] == key;
            if (keys[i] < key && keys[i] > next) next = keys[i];
        }
        return {__reduce_add_sync(kAll, count), warp_max(next)};
    }

    // A tournament of the lanes: only the lane whose key was taken searches for its next best one.
    template <class K, class F>
    __device__ void take_top(K* keys, int n, int count, F f) {
        K key;
        int index;
        find_own_best(keys, n, key, index);
        for (int rank = 0; rank < count; ++rank) {
            const K best = warp_max(key);
            const int winner = __reduce_min_sync(kAll, key == best ? index : INT_MAX);
            if (index == winner) {
                keys[index] = kNoKey<K>;
                find_own_best(keys, n, key, index);
            }
            f(rank, winner);
        }
        __syncwarp();
    }

    __device__ void increment(int64_t* counter) {
        atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull);
    }

  private:
    template <class K>
    __device__ void find_own_best(const K* keys, int n, K& key, int& index) {
        key = kNoKey<K>;
        index = INT_MAX;
        for (int i = lane; i < n; i += 32) {
            if (keys[i] > key) key = keys[i], index = i;
        }
    }

    __device__ static int32_t warp_max(int32_t value) { return __reduce_max_sync(kAll, value); }
    __device__ static int64_t warp_max(int64_t value) {
        for (int distance = 16; distance; distance /= 2) {
            const int64_t other = __shfl_xor_sync(kAll, value, distance);
            value = other > value ? other : value;
        }
        return value;
    }
};

}  // namespace ep::router
