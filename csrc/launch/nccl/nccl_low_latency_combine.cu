#include "fabric/nccl/nccl_fabric.h"
#include "launch/cuda/low_latency_combine.inl"

namespace ep {

template void CudaLowLatency<NcclFabricParams>::combine(LowLatencyLaunches,
                                                        const std::vector<LowLatencyCombineArgs>&,
                                                        DType, CudaStream) const;

template void CudaLowLatency<NcclFabricParams>::load_combine();

}  // namespace ep
