#pragma once

// Who computes a row. The formulas (router/row) are written once, over a Team: the host's is one
// thread whose loops are vectorised, CUDA's is a warp.
//
//   each(n, f)                    f(i) for every i in [0, n), in any order
//   once(f)                       f() by one member
//   sum<R>(n, f)                  f(0) + ... + f(n - 1)
//   max<R>(n, f)                  the largest f(i), ignoring NaN; -inf when there is none
//   count_and_next(keys, n, k)    how many keys equal k, and the largest key below it (kNoKey when
//                                 there is none)
//   take_top(keys, n, count, f)   f(rank, index) for the `count` largest keys, best first, among
//                                 equals the lowest index first; those keys become kNoKey;
//                                 count <= n
//   increment(counter)            adds 1 to a counter that all teams share
//
// What a member writes in one of these is there for all members when the next one begins.

namespace ep::router {

template <class K>
struct KeyCount {
    int count;
    K next;
};

}  // namespace ep::router
