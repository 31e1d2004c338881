#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template struct CombineLaunch<P2pFabricParams, 1, true>;
template struct CombineLaunch<P2pFabricParams, P2pFabricParams::kMaxLocalRanks, true>;

}  // namespace ep
