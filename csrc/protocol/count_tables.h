#pragma once

#include "exec/warp.h"

namespace ep {

// Tables of counts, moved and summed by one warp. A lane loads all of these counts before it stores
// the first, so that it waits for all loads at once.
struct Counts {
    static constexpr int kSize = 8;
    static constexpr int kOfWarp = 32 * kSize;
    int32_t values[kSize];
};

// A place in a row-major table. Division is slow, so it is done once for all places of a lane, and
// not at all in the first row.
struct TablePlace {
    int row, column;

    EP_FN TablePlace(int number, int columns)
        : row(number < columns ? 0 : number / columns), column(number - row * columns) {}
    EP_FN void next(int columns) {
        if (++column < columns) return;
        column = 0;
        ++row;
    }
    EP_FN void advance(const TablePlace& distance, int columns) {
        row += distance.row;
        column += distance.column;
        if (column < columns) return;
        column -= columns;
        ++row;
    }
};

// Calls store(row, column, load(row, column)) for each place of a table.
template <WarpLike W, class Load, class Store>
EP_FN void move_table(W& warp, int rows, int columns, Load&& load, Store&& store) {
    PerLane<W, Counts> counts;
    const int count = rows * columns;
    for (int first = 0; first < count; first += Counts::kOfWarp) {
        const TablePlace distance(32, columns);
        auto for_counts = [&](auto&& f) {
            warp.lanes(lanes_from(first, count), [&](int lane) {
                TablePlace place(first + lane, columns);
                for (int i = 0; i < Counts::kSize; ++i) {
                    if (place.row < rows) f(place.row, place.column, counts[lane].values[i]);
                    place.advance(distance, columns);
                }
            });
        };
        for_counts([&](int row, int column, int32_t& value) { value = load(row, column); });
        for_counts([&](int row, int column, int32_t value) { store(row, column, value); });
    }
}

// Sum and difference that wrap around. Two counts that are not negative add up to less than 2^32,
// so the first sum that int32 cannot hold is negative.
EP_FN int sum_of(int a, int b) {
    return static_cast<int>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
EP_FN int difference_of(int a, int b) {
    return static_cast<int>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

// Calls store(row, column, load(row, column), sum of load over the places before it) for each place
// of a table. Returns the total, or -1 if a count is negative or int32 cannot hold a sum: counts
// come from other ranks. A lane has successive places: one scan over the lanes serves them all.
template <WarpLike W, class Load, class Store>
EP_FN int scan_table(W& warp, int rows, int columns, Load&& load, Store&& store) {
    PerLane<W, Counts> counts;
    PerLane<W, int> before, sign;
    const int count = rows * columns;
    int sum = 0;
    uint32_t wrong = 0;
    for (int first = 0; first < count; first += Counts::kOfWarp) {
        const int left = lanes_from(first, count, Counts::kOfWarp);
        const int lanes = (left + Counts::kSize - 1) / Counts::kSize;
        auto for_counts = [&](int lane, auto&& f) {
            TablePlace place(first + Counts::kSize * lane, columns);
            for (int i = 0; i < Counts::kSize; ++i) {
                f(place.row < rows, place.row, place.column, counts[lane].values[i]);
                place.next(columns);
            }
        };
        warp.lanes(lanes, [&](int lane) {
            before[lane] = 0;
            for_counts(lane, [&](bool exists, int row, int column, int32_t& value) {
                value = exists ? load(row, column) : 0;
            });
            for (const int32_t value : counts[lane].values)
                before[lane] = sum_of(before[lane], value);
        });
        const int total = warp.exclusive_scan(lanes, before);
        warp.lanes(lanes, [&](int lane) {
            int start = sum_of(sum, before[lane]);
            sign[lane] = 0;
            for_counts(lane, [&](bool exists, int row, int column, int32_t value) {
                if (exists) store(row, column, value, start);
                start = sum_of(start, value);
                sign[lane] |= value | start;
            });
        });
        wrong |= warp.ballot(lanes, [&](int lane) { return sign[lane] < 0; });
        sum = sum_of(sum, total);
    }
    return wrong ? -1 : sum;
}

}  // namespace ep
