#pragma once

#include <cstddef>
#include <cstdint>

#include "core/topology.h"
#include "exec/warp.h"
#include "fabric/node_fabric.h"
#include "fabric/queue/send_queue.h"

namespace ep {

// Fabric over send queues. Ranks of a node map each other's heaps, on the host or on GPUs. What
// goes to another node is posted in send queues, which a thread of the host or a network card
// carries out.
//
// The network reads and writes host memory. A GPU's heap is not host memory, so what crosses the
// network, from network_begin on, has a second place there; the part of the heap serves the node.
class QueueFabric;
struct QueueFabricParams {
    using Fabric = QueueFabric;
    static constexpr int kMaxLocalRanks = 1;
    static constexpr bool kFusesNotify = false;
    static constexpr bool kOverHost = true;

    Topology topology;
    char* node[kMaxNodeRanks];  // heaps of the ranks of this node, by local rank
    char* network;              // the network's region: the heap from network_begin on
    size_t network_begin;
    SendQueues queues;
    // A GPU rank's control block in host memory: what it reports, and what it hears of others.
    ControlBlock* report;
    size_t network_bytes;

    void drain(uint64_t) const {}  // connections are closed before memory is used again
    // Clears the network's region and the producers' counters, while no queue is being carried out.
    void reset_signals(int rank, uint64_t timeout_ns) const;
};

class QueueFabric : public NodeFabric<QueueFabricParams> {
  public:
    static constexpr bool kOrdersWarps = true;  // a channel's puts towards a rank share a queue

    EP_FN QueueFabric(const QueueFabricParams& params, int rank)
        : NodeFabric(params, rank), local_(params.topology.local_of(rank)) {}

    template <class T>
    EP_FN T* own(size_t offset) const {
        return peer<T>(local_, offset);
    }

    template <class T>
    EP_FN T* network(size_t offset) const {
        return reinterpret_cast<T*>(params_.network + address(offset));
    }

    template <class W>
    EP_FN uint64_t acquire_signal(int, size_t flag) const {
        return W::template acquire<Scope::System>(network<uint64_t>(flag));
    }

    // ---- to any rank: stores within the node, the queues between nodes

    template <class W>
    EP_FN void put_to(W& warp, int channel, int rank, size_t dst, size_t src, size_t bytes) const {
        const SendQueue queue = params_.queues.puts(channel, rank);
        for (size_t done = 0; done < bytes; done += kMaxBytes) {
            const size_t part = bytes - done < kMaxBytes ? bytes - done : kMaxBytes;
            if (!queue.post_write(warp, rank, address(dst) + done, address(src) + done,
                                  static_cast<uint32_t>(part)))
                return;
        }
    }

    template <class W>
    EP_FN void signal_to(W& warp, int channel, int rank, size_t flag, uint64_t from,
                         uint64_t to) const {
        if (maps(rank)) return warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);
        params_.queues.puts(channel, rank).post_add(warp, rank, address(flag), to - from);
    }

    template <class W>
    EP_FN void credit_to(W& warp, int channel, int rank, size_t flag, uint64_t from,
                         uint64_t to) const {
        if (maps(rank)) return warp.template credit<Scope::System>(at<uint64_t>(rank, flag), to);
        params_.queues.credits(channel, rank).post_add(warp, rank, address(flag), to - from);
    }

    template <class W, class ChannelOf>
    EP_FN void put_each(W& warp, uint32_t lanes, const PerLane<W, int>& rank,
                        ChannelOf&& channel_of, size_t dst, const PerLane<W, size_t>& src,
                        size_t bytes) const {
        post_each(
            warp, lanes, false,
            [&](int lane) { return params_.queues.puts(channel_of(rank[lane]), rank[lane]); },
            [&](int lane) { return rank[lane]; },
            [&](int lane, const SendQueue& queue, uint16_t index) {
                return queue.write_of(index, address(dst), address(src[lane]),
                                      static_cast<uint32_t>(bytes));
            });
    }

    template <class W, class ChannelOf>
    EP_FN void signal_each(W& warp, int first, uint32_t ranks, ChannelOf&& channel_of, size_t flag,
                           const PerLane<W, uint64_t>& from, uint64_t to) const {
        add_each(
            warp, first, ranks,
            [&](int lane) { return params_.queues.puts(channel_of(first + lane), first + lane); },
            flag, [&](int lane) { return to - from[lane]; });
    }

    template <class W>
    EP_FN void credit_each(W& warp, int first, uint32_t ranks, int channel, size_t flag,
                           uint64_t from, uint64_t to) const {
        add_each(
            warp, first, ranks,
            [&](int lane) { return params_.queues.credits(channel, first + lane); }, flag,
            [&](int) { return to - from; });
    }

  private:
    static constexpr size_t kMaxBytes = size_t{1} << 30;  // largest write that cards take

    template <class W, class QueueOf, class IncrementOf>
    EP_FN void add_each(W& warp, int first, uint32_t ranks, QueueOf&& queue_of, size_t flag,
                        IncrementOf&& increment_of) const {
        post_each(
            warp, ranks, true, queue_of, [&](int lane) { return first + lane; },
            [&](int lane, const SendQueue& queue, uint16_t index) {
                return queue.add_of(index, address(flag), increment_of(lane));
            });
    }

    EP_FN size_t address(size_t offset) const { return offset - params_.network_begin; }

    int local_;
};

}  // namespace ep
