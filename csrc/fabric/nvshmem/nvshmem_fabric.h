#pragma once

#include <cstdint>

#include "core/topology.h"
#include "exec/warp.h"
#include "fabric/node_fabric.h"

#if defined(__CUDACC__) && defined(NVSHMEM_VENDOR_MAJOR_VERSION)
#include "exec/device/ptx.h"
#endif

namespace ep {

class NvshmemFabric;

// Fabric over NVSHMEM: heaps are symmetric memory, and processing element r is rank r. Ranks of a
// node load and store each other's memory, and puts go to ranks of other nodes. Flags are only
// added to, by atomics: a sum is never more than what was sent, in whatever order its parts arrive.
//
// A flag must not be seen before the rows that it promises. With IBGDA both are in one queue pair,
// which NVSHMEM chooses by the calling block or warp: the card at the other end carries out an
// atomic when the writes before it are done. Any other transport needs a fence.
struct NvshmemFabricParams {
    using Fabric = NvshmemFabric;
    static constexpr int kMaxLocalRanks = 1;
    static constexpr bool kFusesNotify = false;
    static constexpr bool kOverHost = false;

    Topology topology;
    char* own;
    char* node[kMaxNodeRanks];  // heaps of the ranks of this node, by local rank
    bool needs_fence;           // before a signal

    void drain(uint64_t timeout_ns) const;
    void reset_signals(int, uint64_t) const {}  // all flags lie in the heap
};

#if defined(__CUDACC__) && defined(NVSHMEM_VENDOR_MAJOR_VERSION)

// Not inlined, so that the library's code does not crowd the roles' registers.
__device__ __noinline__ inline void nvshmem_put(void* dst, const void* src, size_t bytes,
                                                int rank) {
    nvshmemx_putmem_nbi_warp(dst, src, bytes, rank);
}
// Adds to a flag. The fence orders earlier puts before the signal, on the way to each rank. Over
// IBGDA it waits for all that this GPU has put to any rank, without a bound.
__device__ __noinline__ inline void nvshmem_add(uint64_t* flag, uint64_t increment, int rank,
                                                bool fence) {
    if (threadIdx.x % 32 == 0) {
        if (fence) nvshmem_fence();
        ptx::delay(flag, increment);
        nvshmemx_signal_op(flag, increment, NVSHMEM_SIGNAL_ADD, rank);
    }
    __syncwarp();
}

// Adds to the flag of rank first + lane for each lane in the mask.
__device__ __noinline__ inline void nvshmem_add_each(uint64_t* flag, uint64_t increment, int first,
                                                     uint32_t ranks, bool fence) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (fence) {
        if (lane == 0) nvshmem_fence();
        __syncwarp();
    }
    ptx::delay(flag, increment);
    if (ranks >> lane & 1) nvshmemx_signal_op(flag, increment, NVSHMEM_SIGNAL_ADD, first + lane);
    __syncwarp();
}

class NvshmemFabric : public NodeFabric<NvshmemFabricParams> {
  public:
    static constexpr bool kOrdersWarps = false;  // warps may have different queue pairs

    using NodeFabric::NodeFabric;

    template <class T>
    EP_FN T* own(size_t offset) const {
        return reinterpret_cast<T*>(params_.own + offset);
    }

    template <class T>
    EP_FN T* network(size_t offset) const {
        return own<T>(offset);
    }

    template <class W>
    EP_FN uint64_t acquire_signal(int, size_t flag) const {
        return W::template acquire<Scope::System>(own<uint64_t>(flag));
    }

    // ---- to any rank: stores within the node, the network between nodes

    template <class W>
    EP_FN void put_to(W& warp, int, int rank, size_t dst, size_t src, size_t bytes) const {
        warp.finish_writes();  // by the copy engine, too, before the network reads them
        nvshmem_put(params_.own + dst, params_.own + src, bytes, rank);
    }

    template <class W>
    EP_FN void signal_to(W& warp, int, int rank, size_t flag, uint64_t from, uint64_t to) const {
        if (maps(rank)) return warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);
        warp.finish_writes();
        nvshmem_add(own<uint64_t>(flag), to - from, rank, params_.needs_fence);
    }

    template <class W>
    EP_FN void credit_to(W& warp, int, int rank, size_t flag, uint64_t from, uint64_t to) const {
        if (maps(rank)) return warp.template credit<Scope::System>(at<uint64_t>(rank, flag), to);
        nvshmem_add(own<uint64_t>(flag), to - from, rank, false);
    }

    template <class W, class ChannelOf>
    EP_FN void put_each(W& warp, uint32_t lanes, const PerLane<W, int>& rank,
                        ChannelOf&& channel_of, size_t dst, const PerLane<W, size_t>& src,
                        size_t bytes) const {
        for_each_lane(lanes, [&](int lane) {
            const int to = warp.broadcast(rank, lane);
            put_to(warp, channel_of(to), to, dst, warp.broadcast(src, lane), bytes);
        });
    }

    template <class W, class ChannelOf>
    EP_FN void signal_each(W& warp, int first, uint32_t ranks, ChannelOf&&, size_t flag,
                           const PerLane<W, uint64_t>& from, uint64_t to) const {
        warp.finish_writes();
        uint64_t increment = 0;  // this lane's
        warp.lanes(32, [&](int lane) { increment = to - from[lane]; });
        nvshmem_add_each(own<uint64_t>(flag), increment, first, ranks, params_.needs_fence);
    }

    template <class W>
    EP_FN void credit_each(W&, int first, uint32_t ranks, int, size_t flag, uint64_t from,
                           uint64_t to) const {
        nvshmem_add_each(own<uint64_t>(flag), to - from, first, ranks, false);
    }
};

#endif

}  // namespace ep
