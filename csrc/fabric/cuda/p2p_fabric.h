#pragma once

#include "core/topology.h"
#include "exec/warp.h"

namespace ep {

// Fabric over mapped heaps: ranks of one process on one GPU, or of processes of one machine through
// CUDA virtual memory or CUDA IPC, and peer access. Between nodes of such a machine rows are packed
// in place; a put (of counts) is a copy, and a signal a release store.
class P2pFabric;

struct P2pFabricParams {
    using Fabric = P2pFabric;
    static constexpr int kMaxLocalRanks = 32;
    static constexpr bool kFusesNotify = true;
    static constexpr bool kOverHost = false;

    Topology topology;
    char* heaps[kMaxNodeRanks];  // of all ranks

    // Nothing to do: stores and signals end with their kernel, and all flags lie in the heap.
    void drain(uint64_t) const {}
    void reset_signals(int, uint64_t) const {}
};

#if defined(__CUDACC__)

class P2pFabric {
  public:
    static constexpr bool kOrdersWarps = true;
    static constexpr bool kKeepsLines = true;
    static constexpr bool kMapsAll = true;

    EP_FN P2pFabric(const P2pFabricParams& params, int rank)
        : params_(params), rank_(rank), own_(params.heaps[rank]) {}

    template <class T>
    EP_FN T* own(size_t offset) const {
        return reinterpret_cast<T*>(own_ + offset);
    }

    template <class T>
    EP_FN T* network(size_t offset) const {
        return own<T>(offset);
    }

    template <class T>
    EP_FN T* peer(int local, size_t offset) const {
        return at<T>(params_.topology.rank(params_.topology.node_of(rank_), local), offset);
    }

    // ---- to any rank

    static EP_FN constexpr bool maps(int) { return true; }

    template <class T>
    EP_FN T* at(int rank, size_t offset) const {
        return reinterpret_cast<T*>(params_.heaps[rank] + offset);
    }

    template <class W>
    EP_FN void put_to(W& warp, int, int rank, size_t dst, size_t src, size_t bytes) const {
        warp.template copy<CacheHint::Keep>(at<char>(rank, dst), own<char>(src), bytes);
    }

    template <class W>
    EP_FN void signal_to(W& warp, int, int rank, size_t flag, uint64_t, uint64_t to) const {
        warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);
    }

    template <class W>
    EP_FN void credit_to(W& warp, int, int rank, size_t flag, uint64_t, uint64_t to) const {
        warp.template credit<Scope::System>(at<uint64_t>(rank, flag), to);
    }

    // Not called: all ranks are mapped.
    template <class... Args>
    EP_FN void put_each(Args&&...) const {}
    template <class... Args>
    EP_FN void signal_each(Args&&...) const {}
    template <class... Args>
    EP_FN void credit_each(Args&&...) const {}

    template <class W>
    EP_FN uint64_t acquire_signal(int, size_t flag) const {
        return W::template acquire<Scope::System>(own<uint64_t>(flag));
    }

  private:
    const P2pFabricParams& params_;
    int rank_;
    char* own_;
};

#endif

}  // namespace ep
