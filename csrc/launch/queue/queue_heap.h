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

// The control block, in pinned host memory, through which a rank on a GPU and the thread of its
// SoftwareNic exchange failures.
class PinnedReport {
  public:
    explicit PinnedReport(int device);
    ControlBlock* data() const { return memory_.get(); }

  private:
    Resource<ControlBlock[]> memory_;
};

// The GPU's side of the queues of a direct card. Their descriptions lie in the GPU's memory.
class GpuCardMapper : public CardMapper {
  public:
    GpuCardMapper(int device, size_t count);

    CardQueue* cards() override { return memory_.get(); }
    void reach(verbs::DirectPair& pair, CardQueue& card) override;
    void upload(const std::vector<CardQueue>& cards) override;

  private:
    int device_;
    Resource<CardQueue[]> memory_;
};

// Checks that a GPU can post in a card's queues. Throws std::runtime_error that says what fails.
void try_card(const std::shared_ptr<verbs::Card>& card, int device);

// The part of a rank's symmetric heap that crosses the network, and the send queues in which its
// GPU posts. Both lie in pinned host memory, so that the thread of SoftwareNic, which carries out
// the queues, calls no CUDA. The producers' counters lie on the GPU. With a direct card the GPU
// posts in the card's own queues instead.
class QueueHeap {
  public:
    // Opens a port of `nic`, see SoftwareNic::open.
    template <class AnyHeap>
    QueueHeap(SoftwareNic& nic, const PinnedReport& report, const AnyHeap& heap, int rank,
              int device)
        : QueueHeap(nic, report, heap.topology, rank, device, heap.network_begin(),
                    heap.network_bytes(), heap.channels, stride_of(heap)) {}
    ~QueueHeap();
    QueueHeap(const QueueHeap&) = delete;

    // Returns the kernels' fabric. node: heaps on the GPUs of this rank's node, by local rank.
    QueueFabricParams fabric(const std::vector<char*>& node) const;

  private:
    QueueHeap(SoftwareNic& nic, const PinnedReport& report, const Topology& topology, int rank,
              int device, size_t begin, size_t bytes, int channels, int stride);
    // Returns the stride for SoftwareNic::open: the normal mode sends along its rail only.
    static int stride_of(const Heap& heap) { return heap.topology.ranks_per_node; }
    static int stride_of(const LowLatencyHeap&) { return 1; }

    SoftwareNic& nic_;
    int device_;
    Resource<char[]> network_, queues_;
    Resource<SendQueue::Producer[]> producers_;
    std::optional<GpuCardMapper> cards_;
    std::shared_ptr<SoftwareNic::Port> port_;
    QueueFabricParams params_{};
};

}  // namespace ep
