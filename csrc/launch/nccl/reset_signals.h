#pragma once

#include "exec/device/ptx.h"
#include "fabric/nccl/nccl_fabric.h"

namespace ep {

// The signal that tells how much was sent to the flag with this number: that and 1, so that it
// says something also of a flag to which nothing was sent.
__device__ __forceinline__ uint32_t total_of(const Heap& heap, size_t number) {
    return static_cast<uint32_t>(heap.network_flags() + number);
}

// By a warp: tells the ranks of the rail what this one has sent to each of their flags.
__device__ __forceinline__ void send_totals(const NcclFabricParams& params, int rank) {
    const Heap& heap = params.heap;
    const Topology& topology = heap.topology;
    const int own_node = topology.node_of(rank), own_local = topology.local_of(rank);
    for (size_t number = 0; number < heap.network_flags(); ++number) {
        const int node = heap.network_flag_node(number);
        if (node == own_node) continue;
        nccl_signal(params, heap.network_flag_channel(number), topology.rank(node, own_local),
                    total_of(heap, number - node + own_node), params.sent[number] + 1);
    }
}

// By a lane: whether all that its node has sent to this rank's flag with that number is there.
__device__ __forceinline__ bool has_arrived(const NcclFabricParams& params, size_t number) {
    const ncclGin gin = gin_of(params.comm, params.heap.network_flag_channel(number));
    const uint64_t total = gin.readSignal(total_of(params.heap, number));
    return total > 0 && gin.readSignal(static_cast<uint32_t>(number)) == total - 1;
}

// One warp. Signals arrive in any order, so none can be the last: each rank tells how much it has
// sent, and the other end waits for as much. Nobody sends before all ranks are done.
static __global__ void reset_signals_kernel(const __grid_constant__ NcclFabricParams params,
                                            int rank, uint64_t timeout_ns) {
    const Heap& heap = params.heap;
    const Topology& topology = heap.topology;
    const int lane = threadIdx.x, own_node = topology.node_of(rank);
    if (lane == 0) *params.absent = 0;
    __syncwarp();
    send_totals(params, rank);
    const uint64_t start = ptx::globaltimer();
    bool all_here = true;
    for (size_t number = lane; number < heap.network_flags() && all_here; number += 32) {
        const int node = heap.network_flag_node(number);
        while (node != own_node && all_here && !has_arrived(params, number)) {
            if (ptx::globaltimer() - start < timeout_ns) continue;
            *params.absent = 1 + topology.rank(node, topology.local_of(rank));
            all_here = false;
        }
    }
    if (!__all_sync(0xffffffffu, all_here)) return;
    for (size_t number = lane; number < heap.network_flags(); number += 32) {
        const ncclGin gin = gin_of(params.comm, heap.network_flag_channel(number));
        gin.resetSignal(static_cast<uint32_t>(number));
        gin.resetSignal(total_of(heap, number));
        params.sent[number] = 0;
    }
}

}  // namespace ep
