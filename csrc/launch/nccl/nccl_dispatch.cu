#include "fabric/nccl/nccl_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template CudaGroup<NcclFabricParams>::CudaGroup(const Heap&, const NcclFabricParams&,
                                                std::vector<int>, const std::vector<char*>&,
                                                const std::vector<char*>&, int, int, double);
template CudaGroup<NcclFabricParams>::~CudaGroup();
template void CudaGroup<NcclFabricParams>::notify(const std::vector<NotifyArgs>&, CudaStream);
template void CudaGroup<NcclFabricParams>::dispatch(const std::vector<DispatchArgs>&, CudaStream);
template void CudaGroup<NcclFabricParams>::combine(const std::vector<CombineArgs>&, DType,
                                                   CudaStream);
template uint64_t CudaGroup<NcclFabricParams>::aborted() const;
template void CudaGroup<NcclFabricParams>::abort(Outcome);
template void CudaGroup<NcclFabricParams>::drain() const;
template void CudaGroup<NcclFabricParams>::reset();

}  // namespace ep
