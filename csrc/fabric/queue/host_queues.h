#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fabric/queue/queue_fabric.h"
#include "fabric/queue/software_nic.h"

namespace ep {

// Queues of a host rank whose nodes are machines, or are treated as such. The network reads and
// writes the network's part of its heap directly.
class HostQueues {
  public:
    // heaps: by rank; those of other machines are not accessed. stride: see SoftwareNic::open.
    template <class AnyHeap>
    HostQueues(SoftwareNic& nic, const AnyHeap& heap, int rank, std::vector<char*> heaps,
               int stride)
        : nic_(nic) {
        const Topology& topology = heap.topology;
        params_.topology = topology;
        for (int local = 0; local < topology.ranks_per_node; ++local)
            params_.node[local] = heaps[topology.rank(topology.node_of(rank), local)];
        params_.network_begin = heap.network_begin();
        for (char*& own : heaps) own = own ? own + params_.network_begin : nullptr;
        params_.network = heaps[rank];
        port_ =
            nic.open(std::move(heaps), heap.network_bytes(), heap.channels, std::nullopt, stride);
        params_.queues = port_->queues();
    }
    ~HostQueues() { nic_.close(port_); }
    HostQueues(const HostQueues&) = delete;

    const QueueFabricParams& params() const { return params_; }

  private:
    SoftwareNic& nic_;
    std::shared_ptr<SoftwareNic::Port> port_;
    QueueFabricParams params_{};
};

}  // namespace ep
