#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/cuda/deferred_release.h"
#include "core/cuda/runtime.h"
#include "launch/cuda/mapped_pages.h"
#include "launch/queue/queue_heap.h"

namespace ep {
namespace {

// Returns the address of pinned memory, which must be the same on the GPU and the host.
template <class T>
T* mapped(T* pinned) {
    if (on_gpu(pinned) != pinned)
        throw std::runtime_error(
            "this GPU has pinned memory of the host at other addresses than the host: the tcp "
            "fabric needs unified addressing");
    return pinned;
}

}  // namespace

PinnedReport::PinnedReport(int device) : memory_(pinned_array<ControlBlock>(device, 1)) {
    std::memset(static_cast<void*>(memory_.get()), 0, sizeof(ControlBlock));
}

QueueHeap::QueueHeap(SoftwareNic& nic, const PinnedReport& report, const Topology& topology,
                     int rank, int device, size_t begin, size_t bytes, int channels, int stride)
    : nic_(nic), device_(device) {
    const DeviceGuard guard(device);
    const size_t count = SendQueues::count(topology.world(), channels);
    network_ = pinned_array<char>(device, bytes);
    queues_ = pinned_array<char>(device, SendQueues::bytes(count, SoftwareNic::kDepth));
    producers_ = device_array<SendQueue::Producer>(device, count);
    params_.topology = topology;
    params_.network = mapped(network_.get());
    params_.network_begin = begin;
    params_.network_bytes = bytes;
    params_.report = report.data();
    std::vector<char*> heaps(topology.world(), nullptr);
    heaps[rank] = network_.get();
    SoftwareNic::QueueMemory memory{mapped(queues_.get()), producers_.get()};
    if (nic_.is_direct()) memory.cards = &cards_.emplace(device, count);
    port_ = nic_.open(std::move(heaps), bytes, channels, memory, stride);
    params_.queues = port_->queues();
    params_.reset_signals(rank, 0);
}

QueueHeap::~QueueHeap() {
    nic_.close(port_);
    if (!cards_) return;
    // Kernels may still use the queue pairs' memory, which the GPU maps, so they go later.
    defer({device_,
           [](void* port) { delete static_cast<std::shared_ptr<SoftwareNic::Port>*>(port); },
           new std::shared_ptr<SoftwareNic::Port>(std::move(port_))});
}

QueueFabricParams QueueHeap::fabric(const std::vector<char*>& node) const {
    if (node.size() > kMaxNodeRanks)
        throw std::invalid_argument("ranks_per_node is " + std::to_string(node.size()) +
                                    ", at most " + std::to_string(kMaxNodeRanks));
    QueueFabricParams params = params_;
    std::copy(node.begin(), node.end(), params.node);
    return params;
}

void QueueFabricParams::reset_signals(int, uint64_t) const {
    std::memset(network, 0, network_bytes);
    check_cuda(cudaMemset(queues.producers, 0, queues.count() * sizeof(SendQueue::Producer)),
               "cudaMemset");
    synchronize_device();
}

GpuCardMapper::GpuCardMapper(int device, size_t count)
    : device_(device), memory_(device_array<CardQueue>(device, count)) {
    check_cuda(cudaMemset(memory_.get(), 0, count * sizeof(CardQueue)), "cudaMemset");
}

void GpuCardMapper::reach(verbs::DirectPair& pair, CardQueue& card) {
    const DeviceGuard guard(device_);
    const auto reach_ring = [&]<class T>(T*& ring, size_t count, MappedPages::Of what) {
        const auto pages = MappedPages::around(ring, count * sizeof(T), what);
        ring = pages->on_gpu(ring);
        pair.keep(pages);
    };
    reach_ring(card.entries, card.last_entry + size_t{1}, MappedPages::Of::Host);
    reach_ring(card.doorbell, 1, MappedPages::Of::Host);
    reach_ring(card.completions, card.last_completion + size_t{1}, MappedPages::Of::Host);
    reach_ring(card.bell, 1, MappedPages::Of::Registers);
}

void GpuCardMapper::upload(const std::vector<CardQueue>& cards) {
    const DeviceGuard guard(device_);
    check_cuda(cudaMemcpy(memory_.get(), cards.data(), cards.size() * sizeof(CardQueue),
                          cudaMemcpyHostToDevice),
               "cudaMemcpy");
}

void try_card(const std::shared_ptr<verbs::Card>& card, int device) {
    verbs::DirectPair pair(card, SoftwareNic::kDepth);
    CardQueue queue = pair.queue();
    GpuCardMapper(device, 1).reach(pair, queue);
}

}  // namespace ep
