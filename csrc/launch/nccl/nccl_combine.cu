#include "fabric/nccl/nccl_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template void CudaGroup<NcclFabricParams>::combine(const std::vector<CombineArgs>&, DType, CudaStream);

}  // namespace ep
