#pragma once

#include "exec/warp.h"

namespace ep {

// A warp reads some counts before it writes the first, and waits for all of these reads at once:
// those of a lane.
struct Counts {
    static constexpr int kSize = 8;
    static constexpr int kOfWarp = 32 * kSize;
    int32_t values[kSize];
};

// f(lane, i, number) for numbers from `first` on, as far as they lie below `count`; i is the place
// in the lane's Counts.
template <WarpLike W, class F>
EP_FN void for_counts(W& warp, int first, int count, F&& f) {
    warp.lanes(lanes_from(first, count), [&](int lane) {
        for (int i = 0; i < Counts::kSize; ++i) {
            const int number = first + 32 * i + lane;
            if (number < count) f(lane, i, number);
        }
    });
}

// store(number, load(number)) for each number below `count`.
template <WarpLike W, class Load, class Store>
EP_FN void move_counts(W& warp, int count, Load&& load, Store&& store) {
    typename W::template PerLane<Counts> counts;
    for (int first = 0; first < count; first += Counts::kOfWarp) {
        for_counts(warp, first, count,
                   [&](int lane, int i, int number) { counts[lane].values[i] = load(number); });
        for_counts(warp, first, count,
                   [&](int lane, int i, int number) { store(number, counts[lane].values[i]); });
    }
}

// store(number, load(number), sum of load over the numbers below it) for each number below `count`.
// Returns the total. A lane has successive numbers: one scan over the lanes for all of them.
template <WarpLike W, class Load, class Store>
EP_FN int scan_counts(W& warp, int count, Load&& load, Store&& store) {
    typename W::template PerLane<Counts> counts;
    typename W::template PerLane<int> before;
    int sum = 0;
    for (int first = 0; first < count; first += Counts::kOfWarp) {
        const int left = lanes_from(first, count, Counts::kOfWarp);
        const int lanes = (left + Counts::kSize - 1) / Counts::kSize;
        warp.lanes(lanes, [&](int lane) {
            for (int i = 0; i < Counts::kSize; ++i) {
                const int number = first + Counts::kSize * lane + i;
                counts[lane].values[i] = number < count ? load(number) : 0;
            }
            before[lane] = 0;
            for (const int32_t value : counts[lane].values) before[lane] += value;
        });
        const int total = warp.exclusive_scan(lanes, before);
        warp.lanes(lanes, [&](int lane) {
            int start = sum + before[lane];
            for (int i = 0; i < Counts::kSize; ++i) {
                const int number = first + Counts::kSize * lane + i;
                if (number < count) store(number, counts[lane].values[i], start);
                start += counts[lane].values[i];
            }
        });
        sum += total;
    }
    return sum;
}

}  // namespace ep
