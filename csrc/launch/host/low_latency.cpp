#include "launch/host/low_latency.h"

#include <cstring>

#include "launch/host/low_latency.inl"

namespace ep {

HostLowLatency::HostLowLatency(HostGroup& group, const LowLatencyHeap& heap,
                               const std::vector<char*>& heaps, int warps)
    : group_(group), heap_(heap), warps_(warps) {
    if (group.nic_)
        queues_ = std::make_unique<HostQueues>(*group.nic_, heap, group.ranks().front(), heaps, 1);
    for (const int rank : group.ranks()) {
        own_heaps_.push_back(heaps[rank]);
        fabrics_.push_back(group.fabric_of(rank, heaps, queues_.get()));
    }
}

HostLowLatency::~HostLowLatency() {
    std::mt19937_64 any_order;
    while (group_.network_ && group_.network_->deliver(any_order)) {
    }
}

void HostLowLatency::reset() {
    for (char* heap : own_heaps_) std::memset(heap, 0, heap_.bytes());
}

using Interrupted = std::function<bool()>;
template void HostLowLatency::dispatch_send<HostWarp>(const std::vector<LowLatencyDispatchArgs>&,
                                                      const Interrupted&);
template void HostLowLatency::dispatch_receive<HostWarp>(const std::vector<LowLatencyDispatchArgs>&,
                                                         const Interrupted&);
template void HostLowLatency::combine_send<HostWarp>(const std::vector<LowLatencyCombineArgs>&,
                                                     DType, const Interrupted&);
template void HostLowLatency::combine_receive<HostWarp>(const std::vector<LowLatencyCombineArgs>&,
                                                        DType, const Interrupted&);

}  // namespace ep
