#include "fabric/queue/queue_fabric.h"
#include "launch/cuda/low_latency.inl"

namespace ep {

using P = CardFabricParams;

template CudaLowLatency<P>::CudaLowLatency(const CudaGroup<P>&, const LowLatencyHeap&, const P&,
                                           const std::vector<char*>&, int);
template int CudaLowLatency<P>::warps() const;
template void CudaLowLatency<P>::dispatch(LowLatencyLaunches,
                                          const std::vector<LowLatencyDispatchArgs>&,
                                          CudaStream) const;
template void CudaLowLatency<P>::load_dispatch();
template void CudaLowLatency<P>::reset();

}  // namespace ep
