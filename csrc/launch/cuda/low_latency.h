#pragma once

#include <vector>

#include "core/low_latency_args.h"
#include "launch/cuda/group.h"

namespace ep {

// The low-latency mode of a group's ranks on a GPU: heaps of its own, but the group's waits and
// incidents. Launches only enqueue. Ranks of one process are launched one after the other: no half
// waits for what is launched after it.
template <class FabricParams>
class CudaLowLatency {
  public:
    // Collective, if the fabric's reset_signals is: nobody sends before all ranks are done.
    //
    // fabric: over the low-latency heaps of all ranks; own_heaps: of the group's ranks, in their
    // order, cleared. blocks: of each launch.
    CudaLowLatency(const CudaGroup<FabricParams>& group, const LowLatencyHeap& heap,
                   const FabricParams& fabric, const std::vector<char*>& own_heaps, int blocks);

    // One argument per rank of this process, in the group's order.
    void dispatch(LowLatencyLaunches launches, const std::vector<LowLatencyDispatchArgs>& args,
                  CudaStream stream) const;
    void combine(LowLatencyLaunches launches, const std::vector<LowLatencyCombineArgs>& args,
                 DType dtype, CudaStream stream) const;

    const std::vector<int>& ranks() const { return group_.ranks(); }
    const LowLatencyHeap& heap() const { return heap_; }
    int warps() const;  // of a launch
    // With the group's reset, and under its conditions. Of several of a group in the same order on
    // all ranks.
    void reset();

  private:
    // Each in the file of the launches: of a kernel in two files CUDA makes two.
    void load_dispatch();
    void load_combine();

    const CudaGroup<FabricParams>& group_;
    LowLatencyHeap heap_;
    FabricParams fabric_;
    std::vector<char*> own_heaps_;
    int blocks_;
    bool early_ = false;  // the kernels wait by themselves for the launch before them
};

}  // namespace ep
