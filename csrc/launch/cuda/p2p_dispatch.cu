#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/group.inl"

namespace ep {

template CudaGroup<P2pFabricParams>::CudaGroup(const Heap&, const P2pFabricParams&,
                                               std::vector<int>, const std::vector<char*>&,
                                               const std::vector<char*>&, int, int, double);
template CudaGroup<P2pFabricParams>::~CudaGroup();
template void CudaGroup<P2pFabricParams>::notify(const std::vector<NotifyArgs>&, CudaStream);
template void CudaGroup<P2pFabricParams>::dispatch(const std::vector<DispatchArgs>&, CudaStream);
template void CudaGroup<P2pFabricParams>::combine(const std::vector<CombineArgs>&, DType,
                                                  CudaStream);
template uint64_t CudaGroup<P2pFabricParams>::aborted() const;
template void CudaGroup<P2pFabricParams>::abort(Outcome);
template void CudaGroup<P2pFabricParams>::drain() const;
template void CudaGroup<P2pFabricParams>::reset();

}  // namespace ep
