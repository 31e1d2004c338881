#pragma once

#include <vector>

#include "core/low_latency_args.h"
#include "launch/cuda/group.h"

namespace ep {

// The low-latency mode of a group without a GPU.
template <class Gate>
class CudaLowLatency {
  public:
    CudaLowLatency(const CudaGroup<Gate>& group, const LowLatencyHeap& heap, const Gate&,
                   const std::vector<char*>&, int blocks)
        : group_(group), heap_(heap), blocks_(blocks) {}

    void dispatch(LowLatencyLaunches, const std::vector<LowLatencyDispatchArgs>&,
                  CudaStream) const {
        Gate::pass();
    }
    void combine(LowLatencyLaunches, const std::vector<LowLatencyCombineArgs>&, DType,
                 CudaStream) const {
        Gate::pass();
    }
    void reset() { Gate::pass(); }

    const std::vector<int>& ranks() const { return group_.ranks(); }
    const LowLatencyHeap& heap() const { return heap_; }
    int warps() const { return blocks_ * 32; }

  private:
    const CudaGroup<Gate>& group_;
    LowLatencyHeap heap_;
    int blocks_;
};

}  // namespace ep
