// WarpLike: what the protocol requires of a warp on a GPU, on the host and in virtual time.
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

// Who may acquire a flag: the roles of one rank, or every rank of the node.
enum class Scope { Rank, System };

// How soon the bytes are used again that a copy writes, or that a stage or a sum reads. Keep: soon,
// as in a ring. EvictFirst: not soon (a row's source, its final place), so they leave the GPU's L2
// cache first.
enum class CacheHint { Keep, EvictFirst };

// What executes a role: 32 lanes in step, kLanesAtOnce of which run at the same time. Values that
// differ between lanes live in a PerLane; everything else is the same in all lanes. Lambdas get the
// lane and run for lanes [0, count), on a GPU at the same time, on the host one by one.
//
// Steps of the lanes
//   lanes(count, f)                  f(lane) for each lane; ordered before what the warp does next
//   ballot(count, f)                 the lanes for which f is true, as bits
//   first_of(count, keys)            the lanes whose key is >= 0 and in no lower lane, as bits
//   last_of(count, keys)             the lanes whose key is >= 0 and in no higher lane, as bits
//   match(count, keys, equal)        for each lane whose key is >= 0 the lanes with its key, as
//                                    bits; for the others 0
//   broadcast(value, lane)           the value of one lane, in all lanes
//   exclusive_scan(count, values)    prefix sums in place; returns the total
//
// Waits are bounded. false, or 0: the wait failed and the role must return
//   met(count, need)                 whether need(lane), a WaitCondition, is met in all lanes;
//                                    does not wait
//   wait_all(wait, count, need)      waits until it is met in all lanes
//   wait_any(wait, count, need)      waits until it is met in some; returns these lanes
//   wait_any_for(wait, count, need, ns)
//                                    waits until it is met in some, for `ns` at most -> Waited
//   elapsed()                            nanoseconds since begin_half, or since the launch
//   begin_half(role)                 this warp's role from now on; its waits share a deadline
//   fail(outcome, wait, need)        records an incident and ends the waits of all ranks; with
//                                    Outcome::CutOff those of this rank alone
//
// Rows
//   copy<CacheHint>(dst, src, bytes)
//   multicast<CacheHint>(dsts, mask, src, bytes)
//                                    one source, a destination per lane in the mask
//   copy_each<CacheHint>(dsts, srcs, mask, bytes)
//                                    a source and a destination per lane in the mask; the sources
//                                    were there when the launch before it ended
//   stage<CacheHint>(src, bytes)     begins to read what the next copy or multicast reads, while
//                                    the warp computes where it goes
//   sum<T, CacheHint>(dst, srcs, weights, mask, count)
//                                    dst[i] = sum over the lanes in the mask of srcs[lane][i], in
//                                    lane order, in fp32 (fp64 for fp64). weights: Unweighted, or
//                                    a PerLane of factors, whose products are rounded before they
//                                    are added, also a single one
//   quantize(dsts, mask, src, count, scales_at, format)
//                                    multicast of a row of `count` bf16 as fp8 (core/float8.h):
//                                    values to each destination, scales scales_at bytes after it
//   zero(dst, bytes)
//
// Flags. A scope says who may acquire them
//   publish<Scope>(flag, value)      a store: an acquire of it sees all that the warp wrote before
//   publish_lanes<Scope>(count, f)   a flag per lane: f(lane, store) may call store(flag, value)
//   credit<Scope>(flag, value)       a store: who sees it knows that the warp has finished all that
//                                    it read, copied or summed before. Not ordered with its writes
//   credit_lanes<Scope>(count, f)    a flag per lane, as publish_lanes
//   acquire<Scope>(flag)             a load, which pairs with publish and credit
//   raise(word, least)               called by one lane: word = max(word, least), in this rank's
//                                    memory. Orders nothing
//   add(count, n)                    called by one lane: adds to a count that no other warp changes
//   arrive<Scope>(counter, n = 1)    adds n and returns the old value: after all that the warp did
//                                    before, and what it does next comes after earlier arrivals
//   take_number(counter)             called by one lane: the same on a counter of this rank, with 1
//   launch_dependents()           called by every warp that waits for no other rank any more: a
//                                    GPU may begin the next launch, which waits for this one's end
//   compare_exchange<Scope>(word, from, to)
//                                    called by one lane: stores `to` if the word is `from`. An
//                                    acquire of the word also sees what the lane had acquired.
//                                    System scope is for rare use: not every bus has the atomic
//
// Words and lines, which have inline flags: see LinesWarpLike.

// How a wait with a time limit has ended. Failed: the role must return.
enum class Waited { Met, Over, Failed };

// A value of each lane of a warp.
template <class W, class T>
using PerLane = typename W::template PerLane<T>;

// In place of weights: rows are not multiplied.
struct Unweighted {};
// Calls f(weights), or f(Unweighted{}) if rows are not multiplied.
template <class Weights, class F>
EP_FN decltype(auto) with_weights(bool is_weighted, const Weights& weights, F&& f) {
    if (is_weighted) return f(weights);
    return f(Unweighted{});
}

// Takes the place of a lambda, which nvcc does not accept in a concept.
struct PublishNothing {
    template <class Store>
    EP_FN void operator()(int, Store&&) const {}
};

template <class W>
concept WarpLike = requires(W& warp, uint64_t* flag, int32_t* count, void* dst, const void* src,
                            size_t bytes, void (*step)(int), bool (*test)(int),
                            WaitCondition (*need)(int), PerLane<W, int>& ints,
                            PerLane<W, uint32_t>& masks, PerLane<W, void*>& dsts,
                            PerLane<W, const void*>& srcs, PerLane<W, float>& weights) {
    { warp.first_of(1, ints) } -> std::same_as<uint32_t>;
    { warp.last_of(1, ints) } -> std::same_as<uint32_t>;
    warp.match(1, ints, masks);
    { W::kLanesAtOnce } -> std::convertible_to<int>;
    { warp.broadcast(ints, 0) } -> std::same_as<int>;
    { warp.exclusive_scan(1, ints) } -> std::same_as<int>;
    { warp.wait_all(Wait::NvlRow, 1, need) } -> std::same_as<bool>;
    { warp.wait_any(Wait::NvlRow, 1, need) } -> std::same_as<uint32_t>;
    { warp.wait_any_for(Wait::NvlRow, 1, need, uint64_t{1}) } -> std::same_as<Waited>;
    { warp.met(1, need) } -> std::same_as<bool>;
    { warp.ballot(1, test) } -> std::same_as<uint32_t>;
    warp.fail(Outcome::Mismatch, Wait::NvlRow, WaitCondition{});
    warp.lanes(1, step);
    warp.template copy<CacheHint::Keep>(dst, src, bytes);
    warp.template multicast<CacheHint::EvictFirst>(dsts, uint32_t{1}, src, bytes);
    warp.template copy_each<CacheHint::EvictFirst>(dsts, srcs, uint32_t{1}, bytes);
    warp.template stage<CacheHint::EvictFirst>(src, bytes);
    warp.template sum<float, CacheHint::EvictFirst>(dst, srcs, Unweighted{}, uint32_t{1}, bytes);
    warp.template sum<float, CacheHint::EvictFirst>(dst, srcs, weights, uint32_t{1}, bytes);
    warp.quantize(dsts, uint32_t{1}, src, bytes, bytes, ScaleFormat::Fp32);
    warp.zero(dst, bytes);
    warp.template publish<Scope::System>(flag, uint64_t{1});
    warp.template publish_lanes<Scope::System>(1, PublishNothing{});
    warp.template credit<Scope::System>(flag, uint64_t{1});
    warp.template credit_lanes<Scope::System>(1, PublishNothing{});
    { W::template acquire<Scope::System>(flag) } -> std::same_as<uint64_t>;
    { warp.elapsed() } -> std::same_as<uint64_t>;
    warp.begin_half(Role::LowLatencyReceiver);
    W::raise(flag, uint64_t{1});
    W::add(count, 1);
    { warp.template arrive<Scope::Rank>(flag, uint64_t{1}) } -> std::same_as<uint64_t>;
    W::launch_dependents();
    { W::take_number(flag) } -> std::same_as<uint64_t>;
    W::template compare_exchange<Scope::Rank>(flag, uint64_t{0}, uint64_t{1});
};

// The lines of a row to receive.
struct LineSource {
    char* slot;        // the row's first line, in memory of this rank
    uint64_t tag;      // that they must have
    int rank;          // rank that stores them
    uint64_t* waited;  // raised to the time after which they arrived, if it had to wait; or null
};

// Rows of lines that are summed once they arrive, one per lane in the mask.
template <class W>
struct RowsToSum {
    PerLane<W, const char*> slot;
    PerLane<W, int> rank;  // rank that stores it
    uint32_t mask;
    uint64_t tag;  // that all lines must have
};

// A warp that also moves words and lines, whose inline flags name their call.
//
//   transpose(bits)                  bit i of lane j becomes bit j of lane i
//   store_word(word, value)          called by one lane: a relaxed store, seen by all ranks
//   load_word(word)                  called by one lane: a relaxed load of such a word
//   send_lines(slots, mask, src, bytes, lines, tag, scales, plan)
//                                    sends these lines of a row of `bytes` bytes, with its scales
//                                    beside them, to the slot of each lane in the mask
//   quantize_lines(slots, mask, src, count, lines, tag, format)
//                                    the same for a row of `count` bf16, as fp8 with its scales
//   receive_lines(wait, source, lines, dsts, mask, bytes, scales, plan)
//                                    waits for these lines and copies them to the row of each lane
//                                    in the mask, with its scales. A mismatch ends the wait, too
//   send_sum<T>(slot, srcs, weights, mask, bytes, lines, tag)
//                                    sends these lines of the sum of the rows in the mask to one
//                                    slot
//   receive_sum<T>(wait, rows, weights, dst, bytes, lines)
//                                    waits for these lines of the rows and writes their sum to the
//                                    row `dst`. A mismatch ends the wait, too
template <class W>
concept LinesWarpLike =
    WarpLike<W> &&
    requires(W& warp, uint64_t* word, PerLane<W, uint32_t>& masks, const char* src, size_t bytes,
             const Lines& lines, const LineSource& source, const ScalePlan& plan,
             const PerLane<W, char*>& rows, char* slot, const PerLane<W, const char*>& srcs,
             const PerLane<W, float>& weights, const RowsToSum<W>& sum) {
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

// For a lane that takes no part in a wait.
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

// The number of lanes of the mask below `lane`.
EP_HD int lanes_below(uint32_t mask, int lane) {
    return popcount(mask & ((uint32_t{1} << lane) - 1));
}

// Loads a word whose value no longer changes, though other warps of this rank may try to.
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

// Calls f(lane), by the whole warp, for every lane of the mask in turn.
template <class F>
EP_FN void for_each_lane(uint32_t mask, F&& f) {
    for (; mask; mask &= mask - 1) f(lowest_lane(mask));
}

}  // namespace ep
