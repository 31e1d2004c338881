#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template struct CombineLaunch<P2pFabricParams, false>;

}  // namespace ep
