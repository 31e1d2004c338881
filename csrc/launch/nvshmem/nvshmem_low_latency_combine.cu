#include <nvshmem.h>
#include <nvshmemx.h>

#include "fabric/nvshmem/nvshmem_fabric.h"
#include "launch/cuda/low_latency_combine.inl"

namespace ep {

template void CudaLowLatency<NvshmemFabricParams>::combine(
    LowLatencyLaunches, const std::vector<LowLatencyCombineArgs>&, DType, CudaStream) const;

template void CudaLowLatency<NvshmemFabricParams>::load_combine();

}  // namespace ep
