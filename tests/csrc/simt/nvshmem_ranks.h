#pragma once

#include "nvshmem.h"
// after it
#include "core/heap.h"
#include "core/low_latency_heap.h"
#include "fabric/nvshmem/nvshmem_fabric.h"
#include "rank_params.h"

namespace ep {

// The ranks of a grid, over NVSHMEM's interface: with IBGDA or without it, as the seed has it. In
// the normal mode each warp speaks for itself, so it is tried with queue pairs of warps.
class Ranks {
  public:
    using Params = RankParams<NvshmemFabricParams>;
    static constexpr bool kOverHost = false;

    template <class AnyHeap>
    Ranks(const AnyHeap& heap, const std::vector<char*>& heaps, uint64_t seed)
        : library_(heaps, heap.bytes(), seed % 3 != 0,
                   std::is_same_v<AnyHeap, Heap> ? simt::Nvshmem::QueuePairsOf::Warps
                                                 : simt::Nvshmem::QueuePairsOf::Blocks,
                   seed),
          params_(std::make_unique<Params>()) {
        const Topology& topology = heap.topology;
        for (int rank = 0; rank < topology.world(); ++rank) {
            NvshmemFabricParams& own = params_->ranks[rank];
            own = {topology, heaps[rank], {}, seed % 3 == 0};
            map_node(own, topology, heaps, rank);
        }
        simt::nvshmem = &library_;
        simt::background = [this] { library_.step(); };
    }
    ~Ranks() { simt::background = nullptr; }
    Ranks(const Ranks&) = delete;
    const Params& params() const { return *params_; }
    void begin_launch() { library_.begin_launch(); }
    void check_reset_signals(uint64_t) {}

  private:
    simt::Nvshmem library_;
    std::unique_ptr<Params> params_;
};

}  // namespace ep
