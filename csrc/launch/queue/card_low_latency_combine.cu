#include "fabric/queue/queue_fabric.h"
#include "launch/cuda/low_latency_combine.inl"

namespace ep {

template void CudaLowLatency<CardFabricParams>::combine(LowLatencyLaunches,
                                                        const std::vector<LowLatencyCombineArgs>&,
                                                        DType, CudaStream) const;

template void CudaLowLatency<CardFabricParams>::load_combine();

}  // namespace ep
