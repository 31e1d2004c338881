#pragma once

#include "exec/device/ptx.h"
#include "fabric/nccl/nccl_fabric.h"

namespace ep {

// One warp. A signal follows all that this rank sent before to the same rank in the same context.
// Rounds are counted for the life of the connection: one that a rank missed, because the network
// failed, ends its use.
static __global__ void reset_signals_kernel(const __grid_constant__ NcclFabricParams params,
                                            int rank, uint64_t timeout_ns) {
    const Topology& topology = params.heap.topology;
    const int lane = threadIdx.x, own_node = topology.node_of(rank),
              own_local = topology.local_of(rank);
    const int contexts = params.comm.ginContextCount, links = topology.nodes * contexts;
    const uint32_t flags = params.heap.network_flags();
    const uint64_t round = params.signal_reset->rounds + 1;
    __syncwarp();
    if (lane == 0) *params.signal_reset = {round, 0};
    for (int link = 0; link < links; ++link) {
        const int node = link / contexts;
        if (node != own_node)
            nccl_signal(params.comm, link % contexts, topology.rank(node, own_local),
                        flags + own_node, 1);
    }
    const uint64_t start = ptx::globaltimer();
    bool all_here = true;
    for (int link = lane; link < links && all_here; link += 32) {
        const int node = link / contexts;
        const ncclGin gin(params.comm, link % contexts);
        while (node != own_node && all_here && gin.readSignal(flags + node) < round) {
            if (ptx::globaltimer() - start < timeout_ns) continue;
            params.signal_reset->absent = 1 + topology.rank(node, own_local);
            all_here = false;
        }
    }
    if (!__all_sync(0xffffffffu, all_here)) return;
    for (int context = 0; context < contexts; ++context) {
        const ncclGin gin(params.comm, context);
        for (uint32_t flag = lane; flag < flags; flag += 32) gin.resetSignal(flag);
    }
}

}  // namespace ep
