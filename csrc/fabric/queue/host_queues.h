#pragma once

#include <memory>
#include <vector>

#include "fabric/queue/queue_fabric.h"
#include "fabric/queue/software_nic.h"

namespace ep {

// A rank on the host whose nodes are machines, or are taken for such: the network reads and writes
// its heap itself.
class HostQueues {
  public:
    // heaps: by rank; of those on other machines nobody touches it. stride: see SoftwareNic::open.
    HostQueues(SoftwareNic& nic, const Topology& topology, int rank, std::vector<char*> heaps,
               size_t bytes, int channels, int stride)
        : nic_(nic), port_(nic.open(heaps, bytes, channels, std::nullopt, stride)) {
        params_.topology = topology;
        for (int local = 0; local < topology.ranks_per_node; ++local)
            params_.node[local] = heaps[topology.rank(topology.node_of(rank), local)];
        params_.network = heaps[rank];
        params_.queues = port_->queues();
    }
    ~HostQueues() { nic_.close(port_); }
    HostQueues(const HostQueues&) = delete;

    const CardFabricParams& params() const { return params_; }

  private:
    SoftwareNic& nic_;
    std::shared_ptr<SoftwareNic::Port> port_;
    CardFabricParams params_{};
};

}  // namespace ep
