#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/low_latency_combine.inl"

namespace ep {

template void CudaLowLatency<P2pFabricParams>::combine(LowLatencyLaunches,
                                                       const std::vector<LowLatencyCombineArgs>&,
                                                       DType, CudaStream) const;

template void CudaLowLatency<P2pFabricParams>::load_combine();

}  // namespace ep
