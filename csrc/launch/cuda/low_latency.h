#pragma once

#include <vector>

#include "core/low_latency_args.h"
#include "launch/cuda/group.h"

namespace ep {

// The low-latency mode of a group's ranks on a GPU. It has its own heaps, and shares the group's
// timeout and control blocks. Launches only enqueue. Each rank of the process has its own launch,
// so with several ranks no launch may wait for a later one.
template <class FabricParams>
class CudaLowLatency {
  public:
    // Collective if the fabric's reset_signals is: no rank may send before all are done.
    //
    // fabric: over the low-latency heaps of all ranks. own_heaps: heaps of the group's ranks, in
    // the group's order, cleared. blocks: number of blocks of each launch.
    CudaLowLatency(const CudaGroup<FabricParams>& group, const LowLatencyHeap& heap,
                   const FabricParams& fabric, const std::vector<char*>& own_heaps, int blocks);

    // One argument per rank of this process, in the group's order.
    void dispatch(LowLatencyLaunches launches, const std::vector<LowLatencyDispatchArgs>& args,
                  CudaStream stream) const;
    void combine(LowLatencyLaunches launches, const std::vector<LowLatencyCombineArgs>& args,
                 DType dtype, CudaStream stream) const;

    // Called together with the group's reset, under its conditions. A group with several of these
    // resets them in the same order on all ranks.
    void reset();

  private:
    // Each is defined in the file that launches its kernels: see low_latency_combine.inl.
    void load_dispatch();
    void load_combine();

    const CudaGroup<FabricParams>& group_;
    LowLatencyHeap heap_;
    FabricParams fabric_;
    std::vector<char*> own_heaps_;
    int blocks_;
    bool early_ = false;  // whether the kernels wait by themselves for the previous launch
};

}  // namespace ep
