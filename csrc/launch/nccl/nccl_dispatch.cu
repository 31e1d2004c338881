#include "fabric/nccl/nccl_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template class CudaGroup<NcclFabricParams>;

}  // namespace ep
