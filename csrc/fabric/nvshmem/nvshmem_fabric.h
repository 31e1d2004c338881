#pragma once

#include <cstdint>

#include "core/topology.h"
#include "exec/warp.h"

namespace ep {

class NvshmemFabric;

// Heaps are NVSHMEM symmetric memory; processing element r is rank r. Ranks of a node load and
// store each other's memory, puts go along the rail.
struct NvshmemFabricParams {
    using Fabric = NvshmemFabric;
    static constexpr int kMostLocalRanks = 1;  // in one process

    Topology topology;
    char* own;
    char* node[kMaxNodeRanks];  // heaps of the ranks of this node, by local rank

    void drain(uint64_t timeout_ns) const;
    void reset_signals(int, uint64_t) const {}  // all flags lie in the heap
};

#if defined(__CUDACC__) && defined(NVSHMEM_VENDOR_MAJOR_VERSION)

// Calls, so that the library's code does not crowd the roles' registers.
__device__ __noinline__ inline void nvshmem_put(void* dst, const void* src, size_t bytes,
                                                int rank) {
    nvshmemx_putmem_nbi_warp(dst, src, bytes, rank);
}
// The fence orders the puts before it and the signal after it, on the way to each rank.
__device__ __noinline__ inline void nvshmem_signal(uint64_t* flag, uint64_t value, int rank) {
    nvshmem_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) nvshmemx_signal_op(flag, value, NVSHMEM_SIGNAL_SET, rank);
    __syncwarp();
}
// Nothing orders credits with each other, hence a sum: the flags of credits are only added to, all
// others only set.
__device__ __noinline__ inline void nvshmem_credit(uint64_t* flag, uint64_t increment, int rank) {
    if (threadIdx.x % 32 == 0) nvshmemx_signal_op(flag, increment, NVSHMEM_SIGNAL_ADD, rank);
    __syncwarp();
}

class NvshmemFabric {
  public:
    static constexpr bool kMapsRail = false;

    __device__ __forceinline__ NvshmemFabric(const NvshmemFabricParams& params, int rank)
        : params_(params), local_(params.topology.local_of(rank)) {}

    template <class T>
    __device__ __forceinline__ T* own(size_t offset) const {
        return reinterpret_cast<T*>(params_.own + offset);
    }

    template <class T>
    __device__ __forceinline__ T* peer(int local, size_t offset) const {
        return reinterpret_cast<T*>(params_.node[local] + offset);
    }

    template <class W>
    __device__ __forceinline__ void put(W& warp, int, int node, size_t dst, size_t src,
                                        size_t bytes) const {
        warp.finish_writes();  // by the copy engine, too, before the network reads them
        nvshmem_put(params_.own + dst, params_.own + src, bytes,
                    params_.topology.rank(node, local_));
    }

    template <class W>
    __device__ __forceinline__ void put_signal(W& warp, int, int node, size_t flag, uint64_t,
                                               uint64_t to) const {
        warp.finish_writes();
        nvshmem_signal(own<uint64_t>(flag), to, params_.topology.rank(node, local_));
    }

    template <class W>
    __device__ __forceinline__ void put_credit(W&, int, int node, size_t flag, uint64_t from,
                                               uint64_t to) const {
        nvshmem_credit(own<uint64_t>(flag), to - from, params_.topology.rank(node, local_));
    }

    template <class W>
    __device__ __forceinline__ uint64_t acquire_signal(int, size_t flag) const {
        return W::template acquire<Scope::System>(own<uint64_t>(flag));
    }

  private:
    const NvshmemFabricParams& params_;
    int local_;
};

#endif

}  // namespace ep
