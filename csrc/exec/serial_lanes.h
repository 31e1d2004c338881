#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "exec/host/rows.h"
#include "exec/warp.h"

namespace ep {

// Lanes that one thread runs one after the other, for warps on the host and in virtual time.
struct SerialLanes {
    template <class T>
    struct PerLane {
        T values[32];
        T& operator[](int lane) { return values[lane]; }
        const T& operator[](int lane) const { return values[lane]; }
    };

    template <class F>
    static uint32_t ballot(int count, F&& f) {
        uint32_t mask = 0;
        for (int lane = 0; lane < count; ++lane)
            mask |= static_cast<uint32_t>(static_cast<bool>(f(lane))) << lane;
        return mask;
    }

    static uint32_t first_of(int count, const PerLane<int>& keys) {
        uint32_t mask = 0;
        for (int lane = 0; lane < count; ++lane) {
            bool first = keys[lane] >= 0;
            for (int lower = 0; first && lower < lane; ++lower) first = keys[lower] != keys[lane];
            mask |= static_cast<uint32_t>(first) << lane;
        }
        return mask;
    }

    static uint32_t last_of(int count, const PerLane<int>& keys) {
        uint32_t mask = 0;
        for (int lane = 0; lane < count; ++lane) {
            bool last = keys[lane] >= 0;
            for (int higher = lane + 1; last && higher < count; ++higher)
                last = keys[higher] != keys[lane];
            mask |= static_cast<uint32_t>(last) << lane;
        }
        return mask;
    }

    static void match(int count, const PerLane<int>& keys, PerLane<uint32_t>& equal) {
        for (int lane = 0; lane < count; ++lane) {
            equal[lane] = keys[lane] < 0
                              ? 0
                              : ballot(count, [&](int other) { return keys[other] == keys[lane]; });
        }
    }

    template <class T>
    static T broadcast(const PerLane<T>& values, int lane) {
        return values[lane];
    }

    static void transpose(PerLane<uint32_t>& bits) {
        PerLane<uint32_t> turned;
        for (int bit = 0; bit < 32; ++bit)
            turned[bit] = ballot(32, [&](int lane) { return bits[lane] >> bit & 1; });
        bits = turned;
    }

    // Gathers the values of the lanes in the mask; returns how many.
    template <class Out, class T>
    static int gather(Out* out, const PerLane<T>& values, uint32_t mask) {
        int count = 0;
        for_each_lane(mask, [&](int lane) { out[count++] = static_cast<Out>(values[lane]); });
        return count;
    }

    template <class T, CacheHint, class Weights>
    static void sum(void* dst, const PerLane<const void*>& srcs, const Weights& weights,
                    uint32_t mask, size_t count) {
        const T* rows[32];
        const int num_rows = gather(rows, srcs, mask);
        if constexpr (std::is_same_v<Weights, Unweighted>) {
            sum_rows(static_cast<T*>(dst), rows, num_rows, count);
        } else {
            Accumulator<T> row_weights[32];
            gather(row_weights, weights, mask);
            weighted_sum_rows(static_cast<T*>(dst), rows, row_weights, num_rows, count);
        }
    }

    static int exclusive_scan(int count, PerLane<int>& values) {
        uint32_t sum = 0;  // wraps around, as on a GPU
        for (int lane = 0; lane < count; ++lane)
            values[lane] =
                static_cast<int>(std::exchange(sum, sum + static_cast<uint32_t>(values[lane])));
        return static_cast<int>(sum);
    }
};

}  // namespace ep
