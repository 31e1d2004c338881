#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template class CudaGroup<P2pFabricParams>;

}  // namespace ep
