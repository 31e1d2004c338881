#include "fabric/nccl/nccl_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template void CudaGroup<NcclFabricParams>::launch_combine<true>(const std::vector<CombineArgs>&,
                                                                DType, CudaStream);

}  // namespace ep
