#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "core/dtypes.h"
#include "core/float8.h"
#include "core/function.h"
#include "core/incident.h"
#include "core/lines.h"

namespace ep {

// Who sees a flag: the roles of one rank, or every rank of the node.
enum class Scope { Rank, System };

// For the bytes that a copy writes, or that a stage or a sum reads. Keep: they are read again soon,
// as in a ring. EvictFirst: nothing reads them again soon (a row's source, its final place), so
// they leave the GPU's L2 cache first.
enum class CacheHint { Keep, EvictFirst };

// What executes a role: 32 lanes that move together, kLanesAtOnce of them at the same time. Values
// that differ between lanes live in a PerLane; everything else is the same in all lanes. Lambdas
// get the lane and run for lanes [0, count); on a GPU at the same time, on the host one by one.
//
// Steps of the lanes
//   lanes(count, f)                  f(lane) for each lane; ordered before what the warp does next
//   ballot(count, f)                 the lanes for which f is true, as bits
//   first_of(count, keys)            the lanes whose key is >= 0 and in no lower lane, as bits
//   last_of(count, keys)             likewise in no higher lane
//   match(count, keys, equal)        for each lane whose key is >= 0 the lanes with its key, as
//                                    bits; for the others 0
//   broadcast(value, lane)           the value of one lane, in all lanes
//   exclusive_scan(count, values)    prefix sums in place; returns the total
//
// Waits. They are bounded: false, or 0, means that the wait ended badly and the role must return
//   met(count, need)                 need(lane) -> WaitCondition: whether every lane has what it
//                                    needs, without a wait
//   wait_all(wait, count, need)      until every lane has
//   wait_any(wait, count, need)      until some lane has; returns the lanes that have
//   wait_a_while(wait, count, need, ns)
//                                    until some lane has, for so long at most -> Waited
//   age()                            nanoseconds since the launch, or its deadline, began
//   begin_half(role)                 what this warp does from now on, by a deadline of its own
//   fail(outcome, wait, need)        records an incident and ends the waits of all ranks; those of
//                                    this rank alone if it is Outcome::CutOff
//
// Rows
//   copy<CacheHint>(dst, src, bytes)
//   multicast<CacheHint>(dsts, mask, src, bytes)
//                                    one source, a destination per lane in the mask
//   copy_each<CacheHint>(dsts, srcs, mask, bytes)
//                                    a source and a destination per lane in the mask; the sources
//                                    were there when the launch before it ended
//   stage<CacheHint>(src, bytes)     begins to read what the next copy or multicast reads, while
//                                    the warp finds out where it goes
//   sum<T, CacheHint>(dst, srcs, mask, count)
//                                    dst[i] = sum over the lanes in the mask of srcs[lane][i], in
//                                    lane order, in fp32 (fp64 for fp64)
//   weighted_sum<T, CacheHint>(dst, srcs, weights, mask, count)
//                                    the same of weights[lane] * srcs[lane][i]: a product is
//                                    rounded, then added, also where it is the only one
//   quantize(dsts, mask, src, count, scales_at, format)
//                                    multicast of a row of bf16 as fp8 (core/float8.h): `count`
//                                    values to each destination, and scales_at bytes from there
//                                    their scales
//   zero(dst, bytes)
//
// Flags. A scope says who may acquire them
//   publish<Scope>(flag, value)      a store: an acquire of it sees all that the warp wrote before
//   publish_lanes<Scope>(count, f)   the same for a flag per lane: f(lane, store) calls
//                                    store(flag, value) or not
//   credit<Scope>(flag, value)       a store: when it is seen, the warp is done with all that it
//                                    read, copied or summed before. What it wrote is in no order
//   credit_lanes<Scope>(count, f)
//   acquire<Scope>(flag)             a load: the other half of both
//   raise(word, least)               by a lane: the word of this rank becomes `least` if it is
//                                    less. Orders nothing
//   add(count, n)                    by a lane: adds to a count that no other warp changes
//   arrive<Scope>(counter, n = 1)    adds n and returns what it was: after all that the warp did
//                                    before, and before what it does next are all who came earlier
//   take_number(counter)             the same by a lane, of a counter of this rank: adds 1
//   let_next_launch_come()           by every warp that waits for no other rank any more: a GPU may
//                                    begin what is launched next, which waits for the end of this
//   compare_exchange<Scope>(word, from, to)
//                                    by a lane: stores `to` if the word is `from`. An acquire of
//                                    the word also sees what the lane had acquired. System scope:
//                                    used seldom, not every bus has the atomic
//
// Words and lines, that need no flag: see LinesWarpLike.

// How a wait that may go on without what it waits for has ended; badly: the role must return.
enum class Waited { Met, Over, Badly };

// For the concept, in which nvcc takes no lambdas.
struct PublishNothing {
    template <class Store>
    EP_FN void operator()(int, Store&&) const {}
};

template <class W>
concept WarpLike = requires(
    W& warp, uint64_t* flag, int32_t* count, void* dst, const void* src, size_t bytes,
    void (*step)(int), bool (*test)(int), WaitCondition (*need)(int),
    typename W::template PerLane<int>& ints, typename W::template PerLane<uint32_t>& masks,
    typename W::template PerLane<void*>& dsts, typename W::template PerLane<const void*>& srcs,
    typename W::template PerLane<float>& weights) {
    { warp.first_of(1, ints) } -> std::same_as<uint32_t>;
    { warp.last_of(1, ints) } -> std::same_as<uint32_t>;
    warp.match(1, ints, masks);
    { W::kLanesAtOnce } -> std::convertible_to<int>;
    { warp.broadcast(ints, 0) } -> std::same_as<int>;
    { warp.exclusive_scan(1, ints) } -> std::same_as<int>;
    { warp.wait_all(Wait::NvlRow, 1, need) } -> std::same_as<bool>;
    { warp.wait_any(Wait::NvlRow, 1, need) } -> std::same_as<uint32_t>;
    { warp.wait_a_while(Wait::NvlRow, 1, need, uint64_t{1}) } -> std::same_as<Waited>;
    { warp.met(1, need) } -> std::same_as<bool>;
    { warp.ballot(1, test) } -> std::same_as<uint32_t>;
    warp.fail(Outcome::Mismatch, Wait::NvlRow, WaitCondition{});
    warp.lanes(1, step);
    warp.template copy<CacheHint::Keep>(dst, src, bytes);
    warp.template multicast<CacheHint::EvictFirst>(dsts, uint32_t{1}, src, bytes);
    warp.template copy_each<CacheHint::EvictFirst>(dsts, srcs, uint32_t{1}, bytes);
    warp.template stage<CacheHint::EvictFirst>(src, bytes);
    warp.template sum<float, CacheHint::EvictFirst>(dst, srcs, uint32_t{1}, bytes);
    warp.template weighted_sum<float, CacheHint::EvictFirst>(dst, srcs, weights, uint32_t{1},
                                                             bytes);
    warp.quantize(dsts, uint32_t{1}, src, bytes, bytes, ScaleFormat::Fp32);
    warp.zero(dst, bytes);
    warp.template publish<Scope::System>(flag, uint64_t{1});
    warp.template publish_lanes<Scope::System>(1, PublishNothing{});
    warp.template credit<Scope::System>(flag, uint64_t{1});
    warp.template credit_lanes<Scope::System>(1, PublishNothing{});
    { W::template acquire<Scope::System>(flag) } -> std::same_as<uint64_t>;
    { warp.age() } -> std::same_as<uint64_t>;
    warp.begin_half(Role::LowLatencyReceiver);
    W::raise(flag, uint64_t{1});
    W::add(count, 1);
    { warp.template arrive<Scope::Rank>(flag, uint64_t{1}) } -> std::same_as<uint64_t>;
    W::let_next_launch_come();
    { W::take_number(flag) } -> std::same_as<uint64_t>;
    W::template compare_exchange<Scope::Rank>(flag, uint64_t{0}, uint64_t{1});
};

// Where a rank's lines come from.
struct LineSource {
    char* slot;        // the row's first line, in memory of this rank
    uint64_t tag;      // that they have to have
    int rank;          // that stores them
    uint64_t* waited;  // raised to the age at which they were there, if not at once. Or null
};

// Rows of lines that are summed once they are there, each lane's own in the mask.
template <class W>
struct RowsToSum {
    typename W::template PerLane<const char*> slot;
    typename W::template PerLane<int> rank;  // that stores it
    uint32_t mask;
    uint64_t tag;  // that all lines have to have
};

// In the place of weights: nothing is multiplied.
struct Unweighted {};

// What also moves what needs no flag, because it says itself of which call it is.
//
//   transpose(bits)                  bit i of lane j becomes bit j of lane i
//   store_word(word, value)          by a lane: a store that orders nothing, seen by all ranks
//   load_word(word)                  by a lane: the load of such a word
//   send_lines(slots, mask, src, bytes, lines, tag, scales, plan)
//                                    these lines of a row of so many bytes to the slot of each lane
//                                    in the mask, with the row's scales beside them
//   quantize_lines(slots, mask, src, count, lines, tag, format)
//                                    the same of a row of so many bf16, as fp8 with its scales
//   receive_lines(wait, source, lines, dsts, mask, bytes, scales, plan)
//                                    these lines, once they are there, to the row of each lane in
//                                    the mask, and its scales. A wait; a mismatch ends it, too
//   send_sum<T>(slot, srcs, weights, mask, bytes, lines, tag)
//                                    these lines of the sum of the rows in the mask, to one slot:
//                                    as sum, or with a PerLane of weights as weighted_sum
//   receive_sum<T>(wait, rows, weights, dst, bytes, lines)
//                                    these lines of such a sum to the row `dst`, once its rows are
//                                    there. A wait; a mismatch ends it, too
template <class W>
concept LinesWarpLike =
    WarpLike<W> &&
    requires(W& warp, uint64_t* word, typename W::template PerLane<uint32_t>& masks,
             const char* src, size_t bytes, const Lines& lines, const LineSource& source,
             const ScalePlan& plan, const typename W::template PerLane<char*>& rows, char* slot,
             const typename W::template PerLane<const char*>& srcs,
             const typename W::template PerLane<float>& weights, const RowsToSum<W>& sum) {
        warp.transpose(masks);
        W::store_word(word, uint64_t{1});
        { W::load_word(word) } -> std::same_as<uint64_t>;
        warp.send_lines(rows, uint32_t{1}, src, bytes, lines, uint64_t{1}, src, plan);
        warp.quantize_lines(rows, uint32_t{1}, src, bytes, lines, uint64_t{1}, ScaleFormat::Fp32);
        {
            warp.receive_lines(Wait::TaggedRow, source, lines, rows, uint32_t{1}, bytes, rows, plan)
        } -> std::same_as<bool>;
        warp.template send_sum<float>(slot, srcs, Unweighted{}, uint32_t{1}, bytes, lines,
                                      uint64_t{1});
        {
            warp.template receive_sum<float>(Wait::TaggedRow, sum, weights, slot, bytes, lines)
        } -> std::same_as<bool>;
    };

// A lane that takes no part in a wait.
EP_HD WaitCondition nothing_to_wait_for() { return {0, 0, -1}; }
EP_HD WaitCondition never() { return {0, ~uint64_t{0}, -1}; }

EP_HD bool is_met(const WaitCondition& need) { return need.observed >= need.required; }

EP_HD int lowest_lane(uint32_t mask) {
#if defined(__CUDA_ARCH__)
    return __ffs(mask) - 1;
#else
    return __builtin_ctz(mask);
#endif
}

EP_HD int highest_lane(uint32_t mask) {
#if defined(__CUDA_ARCH__)
    return 31 - __clz(mask);
#else
    return 31 - __builtin_clz(mask);
#endif
}

EP_HD int nth_lane(uint32_t mask, int n) {
    for (; n; --n) mask &= mask - 1;
    return lowest_lane(mask);
}

EP_HD int popcount(uint32_t mask) {
#if defined(__CUDA_ARCH__)
    return __popc(mask);
#else
    return __builtin_popcount(mask);
#endif
}

// Those of the mask that are lower than `lane`.
EP_HD int lanes_below(uint32_t mask, int lane) {
    return popcount(mask & ((uint32_t{1} << lane) - 1));
}

// A word whose value no longer changes, though other warps of this rank may still try to.
EP_HD uint64_t load_decided(const uint64_t* word) {
#if defined(__CUDA_ARCH__)
    return *word;
#else
    return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

// Lanes for what is left of `count` items from `first` on.
EP_HD int lanes_from(int first, int count, int most = 32) {
    return count - first < most ? count - first : most;
}

// The first `count` lanes, at most 32.
EP_HD uint32_t first_lanes(int count) {
    return count < 32 ? (uint32_t{1} << count) - 1 : ~uint32_t{0};
}

// f(lane) for every lane of the mask, one after the other, by the whole warp.
template <class F>
EP_FN void for_each_lane(uint32_t mask, F&& f) {
    for (; mask; mask &= mask - 1) f(lowest_lane(mask));
}

}  // namespace ep
