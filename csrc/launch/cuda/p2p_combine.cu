#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template struct CombineLaunch<P2pFabricParams, 1, false>;
template struct CombineLaunch<P2pFabricParams, P2pFabricParams::kMaxLocalRanks, false>;

}  // namespace ep
