#pragma once

#include <nccl_device.h>

#include "core/network_flags.h"
#include "core/topology.h"
#include "exec/warp.h"
#include "fabric/node_fabric.h"

#if defined(__CUDACC__)
#include "exec/device/ptx.h"
#endif

namespace ep {

class NcclFabric;

// Fabric over NCCL: heaps are one symmetric window of a communicator of the buffer's ranks. A node
// is one LSA team, whose ranks load and store each other's memory. Between nodes GIN puts and adds
// to signals, which NCCL keeps outside of the window: it orders a signal after earlier puts to the
// same rank in the same context, though not after earlier signals, and a put word after nothing. So
// a flag of the network is the signal of its number, in the context of its channel at both ends.
struct NcclFabricParams {
    using Fabric = NcclFabric;
    static constexpr int kMaxLocalRanks = 1;
    static constexpr bool kFusesNotify = false;
    static constexpr bool kOverHost = false;

    Topology topology;
    NetworkFlags flags;
    ncclDevComm comm;
    ncclWindow_t window;
    uint64_t* sent;  // on the GPU, by number of a flag: how much was sent to that flag's writer
    int* absent;     // on the GPU: 1 + a rank whose signals the last reset did not get
    bool* broken;    // on the host: a reset has failed, and signals are still in flight
    char* node[kMaxNodeRanks];  // heaps of the ranks of this node, by local rank

    // Signals of one rank: its flags, then for each of them how much was sent to it.
    static size_t signals(const NetworkFlags& flags) { return 2 * flags.count(); }

    // Index of a rank among the flags' writers; and the rank of that index for rank `own`.
    EP_HD int writer_of(int rank) const { return rank / ranks_per_writer(); }
    EP_HD int rank_of(int writer, int own) const {
        return writer * ranks_per_writer() + own % ranks_per_writer();
    }
    EP_HD int ranks_per_writer() const { return topology.world() / flags.writers; }

    void drain(uint64_t) const {}  // reset_signals waits at the receiver
    // Waits until all signals to this rank have arrived, and so all puts, and clears the flags of
    // the network. A failure ends the use of the connection.
    void reset_signals(int rank, uint64_t timeout_ns) const;
};

#if defined(__CUDACC__)

EP_FN ncclGin gin_of(const ncclDevComm& comm, int channel) {
    return ncclGin(comm, channel % comm.ginContextCount);
}

// Not inlined, so that the library's code does not crowd the roles' registers. A fence precedes
// what reads rows of other warps. A signal needs none: all that it promises was put in its context.
__device__ __noinline__ inline void nccl_put(const NcclFabricParams& params, int channel, int rank,
                                             size_t dst, size_t src, size_t bytes) {
    __threadfence_system();
    gin_of(params.comm, channel)
        .put(ncclTeamWorld(params.comm), rank, params.window, dst, params.window, src, bytes,
             ncclGin_None{}, ncclGin_None{}, ncclCoopWarp{});
}
// A flag has one writer: at `rank` it is this rank's, here it is counted as that of `rank`.
EP_FN void nccl_count(const NcclFabricParams& params, int rank, uint32_t signal,
                      uint64_t increment) {
    params.sent[signal + params.writer_of(rank) - params.writer_of(params.comm.rank)] += increment;
}
__device__ __noinline__ inline void nccl_signal(const NcclFabricParams& params, int channel,
                                                int rank, uint32_t signal, uint64_t increment) {
    const ncclDevComm& comm = params.comm;
    ptx::delay(&comm, signal + increment);
    gin_of(comm, channel)
        .signal(ncclTeamWorld(comm), rank, ncclGin_SignalAdd{signal, increment}, ncclCoopWarp{});
    if (threadIdx.x % 32 == 0 && signal < params.flags.count())
        nccl_count(params, rank, signal, increment);
    __syncwarp();
}

// Signals rank first + lane for each lane in the mask.
template <class ChannelOf>
EP_FN void nccl_signal_each(const NcclFabricParams& params, int first, uint32_t ranks,
                            ChannelOf&& channel_of, uint32_t signal, uint64_t increment) {
    const int lane = static_cast<int>(threadIdx.x % 32), rank = first + lane;
    const ncclDevComm& comm = params.comm;
    ptx::delay(&comm, signal + increment);
    if (ranks >> lane & 1) {
        gin_of(comm, channel_of(rank))
            .signal(ncclTeamWorld(comm), rank, ncclGin_SignalAdd{signal, increment},
                    ncclCoopThread{});
        nccl_count(params, rank, signal, increment);
    }
    __syncwarp();
}

class NcclFabric : public NodeFabric<NcclFabricParams> {
  public:
    static constexpr bool kOrdersWarps = true;

    EP_FN NcclFabric(const NcclFabricParams& params, int rank)
        : NodeFabric(params, rank), own_(params.node[params.topology.local_of(rank)]) {}

    template <class T>
    EP_FN T* own(size_t offset) const {
        return reinterpret_cast<T*>(own_ + offset);
    }

    template <class T>
    EP_FN T* network(size_t offset) const {
        return own<T>(offset);
    }

    template <class W>
    EP_FN uint64_t acquire_signal(int channel, size_t flag) const {
        return gin_of(params_.comm, channel).readSignal(signal(flag));
    }

    // ---- to any rank: stores within the node, the network between nodes

    template <class W>
    EP_FN void put_to(W& warp, int channel, int rank, size_t dst, size_t src, size_t bytes) const {
        warp.finish_writes();  // by the copy engine, too, before the network reads them
        nccl_put(params_, channel, rank, dst, src, bytes);
    }

    template <class W>
    EP_FN void signal_to(W& warp, int channel, int rank, size_t flag, uint64_t from,
                         uint64_t to) const {
        if (maps(rank)) return warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);
        nccl_signal(params_, channel, rank, signal(flag), to - from);
    }

    template <class W>
    EP_FN void credit_to(W& warp, int channel, int rank, size_t flag, uint64_t from,
                         uint64_t to) const {
        if (maps(rank)) return warp.template credit<Scope::System>(at<uint64_t>(rank, flag), to);
        nccl_signal(params_, channel, rank, signal(flag), to - from);
    }

    template <class W, class ChannelOf>
    EP_FN void put_each(W& warp, uint32_t lanes, const PerLane<W, int>& rank,
                        ChannelOf&& channel_of, size_t dst, const PerLane<W, size_t>& src,
                        size_t bytes) const {
        warp.finish_writes();
        __threadfence_system();
        __syncwarp();  // a lane puts what others have written
        warp.lanes(32, [&](int lane) {
            if (!(lanes >> lane & 1)) return;
            gin_of(params_.comm, channel_of(rank[lane]))
                .put(ncclTeamWorld(params_.comm), rank[lane], params_.window, dst, params_.window,
                     src[lane], bytes, ncclGin_None{}, ncclGin_None{}, ncclCoopThread{});
        });
    }

    template <class W, class ChannelOf>
    EP_FN void signal_each(W& warp, int first, uint32_t ranks, ChannelOf&& channel_of, size_t flag,
                           const PerLane<W, uint64_t>& from, uint64_t to) const {
        uint64_t increment = 0;  // this lane's
        warp.lanes(32, [&](int lane) { increment = to - from[lane]; });
        nccl_signal_each(params_, first, ranks, channel_of, signal(flag), increment);
    }

    template <class W>
    EP_FN void credit_each(W&, int first, uint32_t ranks, int channel, size_t flag, uint64_t from,
                           uint64_t to) const {
        nccl_signal_each(
            params_, first, ranks, [&](int) { return channel; }, signal(flag), to - from);
    }

  private:
    EP_FN uint32_t signal(size_t flag) const {
        return static_cast<uint32_t>(params_.flags.number(flag));
    }

    char* own_;
};

#endif

}  // namespace ep
