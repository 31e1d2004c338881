#include <nvshmem.h>
#include <nvshmemx.h>

#include "fabric/nvshmem/nvshmem_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template class CudaGroup<NvshmemFabricParams>;

}  // namespace ep
