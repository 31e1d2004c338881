#include <nvshmem.h>
#include <nvshmemx.h>

#include "fabric/nvshmem/nvshmem_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template void CudaGroup<NvshmemFabricParams>::combine(const std::vector<CombineArgs>&, DType, CudaStream);

}  // namespace ep
