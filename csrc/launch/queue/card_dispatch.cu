#include "fabric/queue/queue_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template class CudaGroup<CardFabricParams>;

}  // namespace ep
