#pragma once

#include <vector>

#include "core/topology.h"
#include "exec/warp.h"
#include "fabric/simulated.h"

namespace ep {

// Fabric of ranks of one machine, whose heaps are all mapped here: within a process or through
// POSIX shared memory. Rows take the same path as on a cluster: between nodes a put is a copy and a
// signal a release store, or both go through a simulated network.
class HostFabric {
  public:
    static constexpr bool kOrdersWarps = true;
    static constexpr bool kKeepsLines = true;
    static constexpr bool kMapsAll = false;

    HostFabric(Topology topology, int rank, std::vector<char*> heaps,
               SimulatedNetwork* network = nullptr)
        : topology_(topology), rank_(rank), heaps_(std::move(heaps)), network_(network) {}

    template <class T>
    T* own(size_t offset) const {
        return reinterpret_cast<T*>(heaps_[rank_] + offset);
    }

    template <class T>
    T* network(size_t offset) const {
        return own<T>(offset);
    }

    template <class T>
    T* peer(int local, size_t offset) const {
        return at<T>(topology_.rank(topology_.node_of(rank_), local), offset);
    }

    // ---- to any rank: stores within the node, the network between nodes

    bool maps(int rank) const { return topology_.node_of(rank) == topology_.node_of(rank_); }

    template <class T>
    T* at(int rank, size_t offset) const {
        return reinterpret_cast<T*>(heaps_[rank] + offset);
    }

    template <class W>
    void put_to(W& warp, int channel, int rank, size_t dst, size_t src, size_t bytes) {
        if (network_)
            return network_->put(connection_to(rank, channel), at<char>(rank, dst), own<char>(src),
                                 bytes);
        warp.template copy<CacheHint::Keep>(at<char>(rank, dst), own<char>(src), bytes);
    }

    template <class W>
    void signal_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        uint64_t* target = at<uint64_t>(rank, flag);
        if (network_ && !maps(rank))
            return network_->signal(connection_to(rank, channel), target, to - from);
        warp.template publish<Scope::System>(target, to);
    }

    template <class W>
    void credit_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        uint64_t* target = at<uint64_t>(rank, flag);
        if (network_ && !maps(rank))
            return network_->credit(connection_to(rank, channel), target, to - from);
        warp.template credit<Scope::System>(target, to);
    }

    template <class W, class ChannelOf>
    void put_each(W& warp, uint32_t lanes, const PerLane<W, int>& rank, ChannelOf&& channel_of,
                  size_t dst, const PerLane<W, size_t>& src, size_t bytes) {
        for_each_lane(lanes, [&](int lane) {
            const int to = warp.broadcast(rank, lane);
            put_to(warp, channel_of(to), to, dst, warp.broadcast(src, lane), bytes);
        });
    }

    template <class W, class ChannelOf>
    void signal_each(W& warp, int first, uint32_t ranks, ChannelOf&& channel_of, size_t flag,
                     const PerLane<W, uint64_t>& from, uint64_t to) {
        for_each_lane(ranks, [&](int lane) {
            signal_to(warp, channel_of(first + lane), first + lane, flag, from[lane], to);
        });
    }

    template <class W>
    void credit_each(W& warp, int first, uint32_t ranks, int channel, size_t flag, uint64_t from,
                     uint64_t to) {
        for_each_lane(ranks,
                      [&](int lane) { credit_to(warp, channel, first + lane, flag, from, to); });
    }

    template <class W>
    uint64_t acquire_signal(int, size_t flag) const {
        return W::template acquire<Scope::System>(own<uint64_t>(flag));
    }

  protected:
    Topology topology_;
    int rank_;

  private:
    SimulatedNetwork::Connection connection_to(int rank, int channel) const {
        return {rank_, rank, channel};
    }

    std::vector<char*> heaps_;
    SimulatedNetwork* network_;
};

// HostFabric whose nodes are mapped, like the GPUs of one machine: rows for another node are packed
// in its ring directly, and the low-latency mode stores to all ranks.
class MappedHostFabric : public HostFabric {
  public:
    static constexpr bool kMapsAll = true;

    using HostFabric::HostFabric;

    bool maps(int) const { return true; }
};

}  // namespace ep
