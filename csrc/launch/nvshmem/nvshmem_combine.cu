#include <nvshmem.h>
#include <nvshmemx.h>

#include "fabric/nvshmem/nvshmem_fabric.h"
#include "launch/cuda/combine.inl"

namespace ep {

template void CudaGroup<NvshmemFabricParams>::launch_combine<false>(const std::vector<CombineArgs>&,
                                                                    DType, CudaStream);

}  // namespace ep
