#pragma once

#include "exec/device/ptx.h"
#include "fabric/nccl/nccl_fabric.h"

// The kernel that waits for the NCCL signals that are under way and zeroes all of them.
namespace ep {

// Returns the signal that carries the total sent to a flag, plus 1: so 0 means that the total has
// not arrived, also for a flag to which nothing was sent.
EP_FN uint32_t total_of(const NetworkFlags& flags, size_t number) {
    return static_cast<uint32_t>(flags.count() + number);
}

// Whether the flag's writer is on this rank's node, where no signals are used.
EP_FN bool is_unused(const NcclFabricParams& params, int rank, size_t number) {
    const int writer = params.rank_of(params.flags.writer(number), rank);
    return params.topology.node_of(writer) == params.topology.node_of(rank);
}

// Sends the other ranks the totals that this one has sent to each of their flags. Run by one warp.
EP_FN void send_totals(const NcclFabricParams& params, int rank) {
    const NetworkFlags& flags = params.flags;
    for (size_t number = 0; number < flags.count(); ++number) {
        if (is_unused(params, rank, number)) continue;
        const int writer = flags.writer(number);
        nccl_signal(params, flags.channel(number, rank), params.rank_of(writer, rank),
                    total_of(flags, number - writer + params.writer_of(rank)),
                    params.sent[number] + 1);
    }
}

// Whether all that its writer has sent to a flag of this rank has arrived. Run by one lane.
EP_FN bool has_arrived(const NcclFabricParams& params, int rank, size_t number) {
    const ncclGin gin = gin_of(params.comm, params.flags.channel(number, rank));
    const uint64_t total = gin.readSignal(total_of(params.flags, number));
    return total > 0 && gin.readSignal(static_cast<uint32_t>(number)) == total - 1;
}

// Runs in one warp. Signals arrive in any order, so none marks the end: each rank sends its totals,
// and the receiver waits until it has as much. No rank may send before all are done. Sets *absent
// to 1 + the rank whose signals did not come in time.
static __global__ void reset_signals_kernel(const __grid_constant__ NcclFabricParams params,
                                            int rank, uint64_t timeout_ns) {
    const NetworkFlags& flags = params.flags;
    const int lane = threadIdx.x;
    if (lane == 0) *params.absent = 0;
    __syncwarp();
    send_totals(params, rank);
    const uint64_t start = ptx::globaltimer();
    bool all_here = true;
    for (size_t number = lane; number < flags.count() && all_here; number += 32) {
        while (!is_unused(params, rank, number) && all_here && !has_arrived(params, rank, number)) {
            if (ptx::globaltimer() - start < timeout_ns) continue;
            *params.absent = 1 + params.rank_of(flags.writer(number), rank);
            all_here = false;
        }
    }
    if (!__all_sync(0xffffffffu, all_here)) return;
    for (size_t number = lane; number < flags.count(); number += 32) {
        const ncclGin gin = gin_of(params.comm, flags.channel(number, rank));
        gin.resetSignal(static_cast<uint32_t>(number));
        gin.resetSignal(total_of(flags, number));
        params.sent[number] = 0;
    }
}

}  // namespace ep
