#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template void CudaGroup<P2pFabricParams>::launch_combine<true>(const std::vector<CombineArgs>&,
                                                               DType, CudaStream);

}  // namespace ep
