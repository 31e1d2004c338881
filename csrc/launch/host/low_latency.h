#pragma once

#include <functional>
#include <vector>

#include "core/low_latency_args.h"
#include "launch/host/group.h"

namespace ep {

// The low-latency mode of a group's ranks: heaps of its own, but the group's threads, waits and
// incidents.
class HostLowLatency {
  public:
    // heaps: of all ranks, mapped here. warps: of each rank in each half, where the heap has
    // staging at least its channels.
    HostLowLatency(HostGroup& group, const LowLatencyHeap& heap, const std::vector<char*>& heaps,
                   int warps);
    // Once what the simulated network brings to the heaps is there.
    ~HostLowLatency();
    HostLowLatency(const HostLowLatency&) = delete;

    // As HostGroup's launches.
    template <class Warp = HostWarp>
    void dispatch_send(const std::vector<LowLatencyDispatchArgs>& args,
                       const std::function<bool()>& interrupted = {});
    template <class Warp = HostWarp>
    void dispatch_receive(const std::vector<LowLatencyDispatchArgs>& args,
                          const std::function<bool()>& interrupted = {});
    template <class Warp = HostWarp>
    void combine_send(const std::vector<LowLatencyCombineArgs>& args, DType dtype,
                      const std::function<bool()>& interrupted = {});
    template <class Warp = HostWarp>
    void combine_receive(const std::vector<LowLatencyCombineArgs>& args, DType dtype,
                         const std::function<bool()>& interrupted = {});

    HostGroup& group() const { return group_; }
    const LowLatencyHeap& heap() const { return heap_; }
    int warps() const { return warps_; }
    // With the group's reset, and under its conditions.
    void reset();

  private:
    template <class Warp, class Args, class Body>
    void launch(Role role, bool receive, const std::vector<Args>& args,
                const std::function<bool()>& interrupted, Body body);

    HostGroup& group_;
    LowLatencyHeap heap_;
    int warps_;
    std::vector<AnyHostFabric> fabrics_;
    std::vector<char*> own_heaps_;
    std::unique_ptr<HostQueues> queues_;
};

}  // namespace ep
