#include "fabric/queue/queue_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template struct CombineLaunch<CardFabricParams, 1, true>;

}  // namespace ep
