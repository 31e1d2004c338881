#pragma once

#include <memory>
#include <vector>

#include "fabric/host_fabric.h"
#include "fabric/queue/software_nic.h"

namespace ep {

// Ranks of several machines: those of a node map each other's heaps, and what goes to another node
// is posted in send queues.
class QueueFabric : public HostFabric {
  public:
    static constexpr bool kMapsRail = false;
    static constexpr bool kOrdersWarps = true;  // a channel's puts towards a rank share a queue

    QueueFabric(Topology topology, int rank, std::vector<char*> heaps,
                std::shared_ptr<SoftwareNic::Port> port)
        : HostFabric(topology, rank, std::move(heaps)), port_(std::move(port)) {}

    template <class W>
    void put(W& warp, int channel, int node, size_t dst, size_t src, size_t bytes) {
        post_write(warp, channel, rail_of(node), dst, src, bytes);
    }

    template <class W>
    void put_signal(W& warp, int channel, int node, size_t flag, uint64_t from, uint64_t to) {
        post_add(warp, port_->puts(channel, rail_of(node)), rail_of(node), flag, to - from);
    }

    template <class W>
    void put_credit(W& warp, int channel, int node, size_t flag, uint64_t from, uint64_t to) {
        post_add(warp, port_->credits(channel, rail_of(node)), rail_of(node), flag, to - from);
    }

    // ---- to any rank: stores within the node, the queues between nodes

    template <class W>
    void put_to(W& warp, int channel, int rank, size_t dst, size_t src, size_t bytes) {
        post_write(warp, channel, rank, dst, src, bytes);
    }

    template <class W>
    void signal_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        if (this->maps(rank)) return HostFabric::signal_to(warp, channel, rank, flag, from, to);
        post_add(warp, port_->puts(channel, rank), rank, flag, to - from);
    }

    template <class W>
    void credit_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        if (this->maps(rank)) return HostFabric::credit_to(warp, channel, rank, flag, from, to);
        post_add(warp, port_->credits(channel, rank), rank, flag, to - from);
    }

  private:
    static constexpr size_t kMostBytes = size_t{1} << 30;  // of one entry, as cards take them

    int rail_of(int node) const { return topology_.rank(node, topology_.local_of(rank_)); }

    // Not rung: the signal that follows does.
    template <class W>
    void post_write(W& warp, int channel, int rank, size_t dst, size_t src, size_t bytes) {
        const SendQueue& queue = port_->puts(channel, rank);
        for (size_t done = 0; done < bytes;) {
            const size_t part = std::min(bytes - done, kMostBytes);
            if (!make_room(warp, queue, rank)) return;
            queue.post(SendEntry::write_of(queue.next_index(), queue.number, queue.key, dst + done,
                                           src + done, static_cast<uint32_t>(part)));
            done += part;
        }
    }

    template <class W>
    void post_add(W& warp, const SendQueue& queue, int rank, size_t flag, uint64_t increment) {
        if (!make_room(warp, queue, rank)) return;
        queue.post(SendEntry::add_of(queue.next_index(), queue.number, queue.key, flag, increment,
                                     queue.scratch));
        queue.ring();
        port_->wake();
    }

    template <class W>
    bool make_room(W& warp, const SendQueue& queue, int rank) {
        if (queue.has_room()) return true;
        queue.ring();  // what waits for its signal must leave, or there is never room
        port_->wake();
        return queue.wait_for_room(warp, rank);
    }

    std::shared_ptr<SoftwareNic::Port> port_;
};

}  // namespace ep
