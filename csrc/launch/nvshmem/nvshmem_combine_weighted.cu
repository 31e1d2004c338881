#include <nvshmem.h>
#include <nvshmemx.h>

#include "fabric/nvshmem/nvshmem_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template struct CombineLaunch<NvshmemFabricParams, 1, true>;

}  // namespace ep
