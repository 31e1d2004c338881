#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/heap.h"
#include "core/incident.h"
#include "core/low_latency_heap.h"
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

// The queue pairs of a card in which a GPU posts: what it must know of them lies in its memory.
class CardsOfGpu : public GpuOfCards {
  public:
    CardsOfGpu(int device, size_t count);

    CardQueue* cards() override { return memory_.get(); }
    void reach(verbs::DirectPair& pair, CardQueue& card) override;
    void tell(const std::vector<CardQueue>& cards) override;

  private:
    int device_;
    Resource<CardQueue[]> memory_;
};

// Whether a GPU can post in a card's queues. Throws std::runtime_error with what it lacks.
void try_card(const std::shared_ptr<verbs::Card>& card, int device);

// A rank's part of a symmetric heap that crosses the network, and its send queues, where a thread
// of the host carries out what a GPU posts: in pinned memory, so that this thread calls no CUDA.
// What the warps count lies on the GPU. Where the network's card is direct, the GPU posts in the
// card's own queues instead.
class QueueHeap {
  public:
    // Opens a port: see SoftwareNic.
    template <class AnyHeap>
    QueueHeap(SoftwareNic& nic, const PinnedReport& report, const AnyHeap& heap, int rank,
              int device)
        : QueueHeap(nic, report, heap.topology, rank, device, heap.network_begin(),
                    heap.network_bytes(), heap.channels, stride_of(heap)) {}
    ~QueueHeap();
    QueueHeap(const QueueHeap&) = delete;

    // node: heaps on the GPUs of this rank's node, by local rank.
    QueueFabricParams fabric(const std::vector<char*>& node) const;

  private:
    QueueHeap(SoftwareNic& nic, const PinnedReport& report, const Topology& topology, int rank,
              int device, size_t begin, size_t bytes, int channels, int stride);
    // See SoftwareNic::open.
    static int stride_of(const Heap& heap) { return heap.topology.ranks_per_node; }
    static int stride_of(const LowLatencyHeap&) { return 1; }

    SoftwareNic& nic_;
    int device_;
    Resource<char[]> network_, queues_;
    Resource<SendQueue::Producer[]> producers_;
    std::optional<CardsOfGpu> cards_;
    std::shared_ptr<SoftwareNic::Port> port_;
    QueueFabricParams params_{};
};

}  // namespace ep
