#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "exec/warp.h"

namespace ep {

// How bytes leave a rank. Offsets are into the symmetric heap.
//
//   own<T>(offset)             memory of this rank
//   network<T>(offset)         memory of this rank as the network reads and writes it: sources of
//                              puts, what others put, and their signals. It differs from own()
//                              where the network cannot reach that
//   peer<T>(local, offset)     memory of a rank of the same node: plain loads and stores
//   kMapsAll                   whether every rank's memory is mapped; kernels then contain no
//                              code for ranks that are not
//   at<T>(rank, offset)        memory of a rank, only where it is mapped: plain loads and stores
//   put_to(warp, channel, rank, dst, src, bytes)
//                              one-sided write to that rank. `src` lies in network() and must not
//                              change before the reader has acknowledged the data: a put
//                              may read it late
//   signal_to(warp, channel, rank, flag, from, to)
//                              moves that rank's flag to `to` from `from`, the last signal's
//                              value; a fabric may set it or add to it. Who sees the flag also sees
//                              all puts that this warp made before in this call on that (channel,
//                              rank), and all stores to that rank that it made or acquired
//   kOrdersWarps               whether a signal also covers puts of other warps and earlier calls
//   credit_to(warp, channel, rank, flag, from, to)
//                              a signal for reads: who sees the flag knows that this warp, and the
//                              warps that it acquired from, are done reading. Not ordered with
//                              puts, nor with other credits, so a fabric may set the flag instead
//                              of adding to it only if it keeps its credits in order: otherwise an
//                              old one could undo a new one
//   acquire_signal<W>(channel, flag)
//                              called by one lane: an acquire load of this rank's flag, which pairs
//                              with signal_to and credit_to
template <class F, class W>
concept FabricLike =
    WarpLike<W> && requires(F& fabric, W& warp, size_t offset, uint64_t from, uint64_t to) {
        { fabric.template own<uint64_t>(offset) } -> std::same_as<uint64_t*>;
        { fabric.template network<uint64_t>(offset) } -> std::same_as<uint64_t*>;
        { fabric.template peer<uint64_t>(0, offset) } -> std::same_as<uint64_t*>;
        { F::kOrdersWarps } -> std::convertible_to<bool>;
        { F::kMapsAll } -> std::convertible_to<bool>;
        { fabric.template at<uint64_t>(0, offset) } -> std::same_as<uint64_t*>;
        fabric.put_to(warp, 0, 0, offset, offset, offset);
        fabric.signal_to(warp, 0, 0, offset, from, to);
        fabric.credit_to(warp, 0, 0, offset, from, to);
        { fabric.template acquire_signal<W>(0, offset) } -> std::same_as<uint64_t>;
    };

// Host side of a fabric between GPUs: a kernel parameter of which `Fabric`, its device side, is
// made.
//
//   kMaxLocalRanks                   most ranks of a process
//   kFusesNotify                    whether a dispatch within a node includes the notify
//   kOverHost                        whether what goes to other nodes lies in host memory
//
// Recovery calls these after a failure, when nothing runs any more on this rank:
//
//   drain(timeout_ns)                waits until all puts and signals of this rank have arrived:
//                                    later they would land in rings that are in use again
//   reset_signals(rank, timeout_ns)  clears the network's flags outside of the heap. Collective:
//                                    all ranks have drained, and none sends before all are done
//
// Both throw std::runtime_error on a timeout, and are empty where there is nothing to do.
template <class P>
concept FabricParamsLike = requires(const P& params, int rank, uint64_t timeout_ns) {
    typename P::Fabric;
    { P::kMaxLocalRanks } -> std::convertible_to<int>;
    { P::kFusesNotify } -> std::convertible_to<bool>;
    { P::kOverHost } -> std::convertible_to<bool>;
    { params.drain(timeout_ns) } -> std::same_as<void>;
    { params.reset_signals(rank, timeout_ns) } -> std::same_as<void>;
};

// Takes the place of a lambda, which nvcc does not accept in a concept.
struct FirstChannel {
    EP_FN int operator()(int) const { return 0; }
};

// What the low-latency mode needs of a fabric in addition.
//
//   kKeepsLines                whether a line (core/lines.h) stored to any rank may arrive whole:
//                              the heap says whether it does
//   maps(rank)                 whether this rank stores to that rank's memory
//   put_each(warp, lanes, rank, channel_of, dst, src, bytes)
//                              one put per lane in the mask `lanes`, from src[lane] to rank[lane]
//                              over channel_of(rank), of at most 1 GB: to different ranks, none of
//                              which is mapped
//   signal_each(warp, first, ranks, channel_of, flag, from, to)
//   credit_each(warp, first, ranks, channel, flag, from, to)
//                              one signal or credit per lane in the mask `ranks`, to rank
//                              first + lane, none of which is mapped. Signals move each rank's
//                              flag from from[lane]
template <class F, class W>
concept ReachesAllRanks =
    FabricLike<F, W> &&
    requires(F& fabric, W& warp, size_t offset, uint64_t from, uint64_t to, PerLane<W, int>& ranks,
             PerLane<W, size_t>& offsets, PerLane<W, uint64_t>& numbers) {
        { F::kKeepsLines } -> std::convertible_to<bool>;
        { fabric.maps(0) } -> std::same_as<bool>;
        fabric.put_each(warp, uint32_t{1}, ranks, FirstChannel{}, offset, offsets, offset);
        fabric.signal_each(warp, 0, uint32_t{1}, FirstChannel{}, offset, numbers, to);
        fabric.credit_each(warp, 0, uint32_t{1}, 0, offset, from, to);
    };

}  // namespace ep
