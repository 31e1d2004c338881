#pragma once

#include <memory>
#include <vector>

#include "core/incident.h"
#include "fabric/queue/queue_fabric.h"
#include "fabric/queue/software_nic.h"
#include "launch/cuda/resource.h"

namespace ep {

// What a rank on a GPU tells of itself, and hears of others, in pinned memory of the host.
class PinnedReport {
  public:
    explicit PinnedReport(int device);
    ControlBlock* data() const { return memory_.get(); }

  private:
    Resource<ControlBlock[]> memory_;
};

// A rank's part of a symmetric heap that crosses the network, and its send queues, where a thread
// of the host carries out what a GPU posts: in pinned memory, so that this thread calls no CUDA.
// What the warps count lies on the GPU.
class QueueHeap {
  public:
    // Opens a port: see SoftwareNic.
    template <class AnyHeap>
    QueueHeap(SoftwareNic& nic, const PinnedReport& report, const AnyHeap& heap, int rank,
              int device)
        : QueueHeap(nic, report, heap.topology, rank, device, heap.network_begin(),
                    heap.bytes() - heap.network_begin(), heap.channels) {}
    ~QueueHeap();
    QueueHeap(const QueueHeap&) = delete;

    // node: heaps on the GPUs of this rank's node, by local rank.
    QueueFabricParams fabric(const std::vector<char*>& node) const;

  private:
    QueueHeap(SoftwareNic& nic, const PinnedReport& report, const Topology& topology, int rank,
              int device, size_t begin, size_t bytes, int channels);

    SoftwareNic& nic_;
    Resource<char[]> network_, queues_;
    Resource<SendQueue::Producer[]> producers_;
    std::shared_ptr<SoftwareNic::Port> port_;
    QueueFabricParams params_{};
};

}  // namespace ep
