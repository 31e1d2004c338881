#pragma once

// A Team computes a row. The formulas (rows.h) are written once, over a Team: the host's is one
// thread whose loops are vectorized, CUDA's is a warp.
//
//   each(n, f)                    f(i) for every i in [0, n), in any order
//   once(f)                       f() by one member
//   sum<R>(n, f)                  f(0) + ... + f(n - 1)
//   max<R>(n, f)                  the largest f(i), ignoring NaN; -inf when there is none
//   sum_top<R>(keys, n, count)    the sum of the `count` largest keys as reals, added best first;
//                                 count <= n
//   take_top(keys, n, count, f)   f(rank, index) for the `count` largest keys, best first, among
//                                 equals the lowest index first; those keys become kNoKey;
//                                 count <= n
//   increment(counter)            adds 1 to a counter that all teams share
//
// What a member writes in one of these is visible to all members when the next one begins.

#include "router/number.h"

namespace ep::router {

template <class K>
struct KeyCount {
    int count;
    K next;
};

// sum_top for a team that can count: count_and_next(keys, n, k) returns how many keys equal k, and
// the largest key below it (kNoKey: none). Positions do not matter, so equal keys are counted.
template <class R, class Team>
EP_FN R sum_top_by_counting(Team& team, const Key<R>* keys, int n, int count) {
    Key<R> key = kNanKey<Key<R>>;  // nothing is above it
    R sum = 0;
    for (int left = count, added = 0;; added = 1) {
        const KeyCount<Key<R>> found = team.count_and_next(keys, n, key);
        for (; added < found.count && left > 0; ++added, --left) sum += from_key<R>(key);
        if (left == 0) return sum;
        key = found.next;
        sum += from_key<R>(key);
        if (--left == 0) return sum;
    }
}

}  // namespace ep::router
