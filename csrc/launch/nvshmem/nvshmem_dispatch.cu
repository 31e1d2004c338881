#include <nvshmem.h>
#include <nvshmemx.h>

#include "fabric/nvshmem/nvshmem_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template CudaGroup<NvshmemFabricParams>::CudaGroup(const Heap&, const NvshmemFabricParams&,
                                                   std::vector<int>, const std::vector<char*>&,
                                                   const std::vector<char*>&, int, int, double);
template CudaGroup<NvshmemFabricParams>::~CudaGroup();
template void CudaGroup<NvshmemFabricParams>::notify(const std::vector<NotifyArgs>&, CudaStream);
template void CudaGroup<NvshmemFabricParams>::dispatch(const std::vector<DispatchArgs>&,
                                                       CudaStream);
template void CudaGroup<NvshmemFabricParams>::combine(const std::vector<CombineArgs>&, DType,
                                                      CudaStream);
template uint64_t CudaGroup<NvshmemFabricParams>::aborted() const;
template void CudaGroup<NvshmemFabricParams>::abort(Outcome);
template void CudaGroup<NvshmemFabricParams>::drain() const;
template void CudaGroup<NvshmemFabricParams>::reset();

}  // namespace ep
