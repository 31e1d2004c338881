#pragma once

#include <functional>
#include <vector>

#include "core/low_latency_args.h"
#include "launch/host/group.h"

namespace ep {

// The low-latency mode of a group's ranks on the host. It has its own heaps, and shares the group's
// threads, timeout and control blocks.
class HostLowLatency {
  public:
    // heaps: by rank, all mapped here. warps: per rank in each half, at least the heap's channels
    // if it has staging.
    HostLowLatency(HostGroup& group, const LowLatencyHeap& heap, const std::vector<char*>& heaps,
                   int warps);
    // Delivers what the simulated network still holds for these heaps.
    ~HostLowLatency();
    HostLowLatency(const HostLowLatency&) = delete;

    // The arguments are those of HostGroup's launches. Of both halves the sending one comes first.
    void dispatch(LowLatencyLaunches launches, const std::vector<LowLatencyDispatchArgs>& args,
                  const std::function<bool()>& interrupted = {});
    void combine(LowLatencyLaunches launches, const std::vector<LowLatencyCombineArgs>& args,
                 DType dtype, const std::function<bool()>& interrupted = {});

    // Called together with the group's reset, under its conditions.
    void reset();

  private:
    template <LowLatencyLaunches kHalf, class Args, class Share>
    void run_half(const std::vector<Args>& args, const std::function<bool()>& interrupted,
                  Share share);
    template <class Args, class Share>
    void run(LowLatencyLaunches launches, const std::vector<Args>& args,
             const std::function<bool()>& interrupted, Share share);

    HostGroup& group_;
    LowLatencyHeap heap_;
    int warps_;
    std::vector<AnyHostFabric> fabrics_;
    std::vector<char*> own_heaps_;
    std::unique_ptr<HostQueues> queues_;
};

}  // namespace ep
