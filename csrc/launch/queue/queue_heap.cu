#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/cuda/runtime.h"
#include "launch/queue/queue_heap.h"

namespace ep {
namespace {

// Where the GPU has it.
template <class T>
T* mapped(T* pinned) {
    void* address = nullptr;
    check_cuda(cudaHostGetDevicePointer(&address, pinned, 0), "cudaHostGetDevicePointer");
    if (address != pinned)
        throw std::runtime_error(
            "this GPU has pinned memory of the host at other addresses than the host: the tcp "
            "fabric needs unified addressing");
    return pinned;
}

}  // namespace

PinnedReport::PinnedReport(int device)
    : memory_(as_array<ControlBlock>(pinned_memory(device, sizeof(ControlBlock)))) {
    std::memset(static_cast<void*>(memory_.get()), 0, sizeof(ControlBlock));
}

QueueHeap::QueueHeap(SoftwareNic& nic, const PinnedReport& report, const Topology& topology,
                     int rank, int device, size_t begin, size_t bytes, int channels)
    : nic_(nic) {
    const DeviceGuard guard(device);
    const size_t count = SendQueues::count(topology.world(), channels);
    network_ = as_array<char>(pinned_memory(device, bytes));
    queues_ = as_array<char>(pinned_memory(device, SendQueues::bytes(count, SoftwareNic::kDepth)));
    producers_ =
        as_array<SendQueue::Producer>(device_memory(device, count * sizeof(SendQueue::Producer)));
    params_.topology = topology;
    params_.network = mapped(network_.get());
    params_.network_begin = begin;
    params_.network_bytes = bytes;
    params_.report = report.data();
    std::vector<char*> heaps(topology.world(), nullptr);
    heaps[rank] = network_.get();
    port_ = nic_.open(std::move(heaps), bytes, channels,
                      SoftwareNic::QueueMemory{mapped(queues_.get()), producers_.get()});
    params_.queues = port_->queues();
    params_.reset_signals(rank, 0);
}

QueueHeap::~QueueHeap() { nic_.close(port_); }

QueueFabricParams QueueHeap::fabric(const std::vector<char*>& node) const {
    QueueFabricParams params = params_;
    if (node.size() > kMaxNodeRanks)
        throw std::invalid_argument("ranks_per_node is " + std::to_string(node.size()) +
                                    ", at most " + std::to_string(kMaxNodeRanks));
    std::copy(node.begin(), node.end(), params.node);
    return params;
}

void QueueFabricParams::reset_signals(int, uint64_t) const {
    std::memset(network, 0, network_bytes);
    check_cuda(cudaMemset(queues.producers, 0, queues.count() * sizeof(SendQueue::Producer)),
               "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace ep
