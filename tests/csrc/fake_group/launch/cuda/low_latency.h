#pragma once

#include <vector>

#include "core/low_latency_args.h"
#include "launch/cuda/group.h"

namespace ep {

// The low-latency mode of a group without a GPU.
template <class Gate>
class CudaLowLatency {
  public:
    CudaLowLatency(const CudaGroup<Gate>&, const LowLatencyHeap&, const Gate&,
                   const std::vector<char*>&, int) {}

    void dispatch(LowLatencyLaunches, const std::vector<LowLatencyDispatchArgs>&,
                  CudaStream) const {
        Gate::pass();
    }
    void combine(LowLatencyLaunches, const std::vector<LowLatencyCombineArgs>&, DType,
                 CudaStream) const {
        Gate::pass();
    }
    void reset() { Gate::pass(); }
};

}  // namespace ep
