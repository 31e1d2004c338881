#include "fabric/nccl/nccl_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template struct CombineLaunch<NcclFabricParams, 1, true>;

}  // namespace ep
