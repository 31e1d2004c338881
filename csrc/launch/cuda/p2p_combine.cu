#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/group.inl"

// In a file of its own because it takes the compiler longest.
namespace ep {

template void CudaGroup<P2pFabricParams>::combine(const std::vector<CombineArgs>&, DType, CudaStream);

}  // namespace ep
