#pragma once

#include "fabric/nccl/nccl_fabric.h"
#include "launch/nccl/reset_signals.h"
#include "simt.h"

namespace ep {

// Every rank has parameters of its own: in a grid of all ranks they travel together.
class RankFabric;
struct RankFabricParams {
    using Fabric = RankFabric;
    NcclFabricParams ranks[9];
};
class RankFabric : public NcclFabric {
  public:
    RankFabric(const RankFabricParams& params, int rank) : NcclFabric(params.ranks[rank], rank) {}
};

// The ranks of a grid, over NCCL's interface.
class Ranks {
  public:
    using Params = RankFabricParams;

    Ranks(const Heap& heap, const std::vector<char*>& heaps, uint64_t seed)
        : heap_(heap), signal_resets_(heaps.size()), params_(std::make_unique<Params>()) {
        const Topology& topology = heap.topology;
        const int signals = static_cast<int>(NcclFabricParams::signals(heap));
        const int contexts = signals ? simt::Gin::kContexts : 0;
        gin_.random.seed(seed);
        gin_.heaps = heaps;
        gin_.signals.assign(heaps.size(), std::vector<uint64_t>(contexts * signals));
        for (int rank = 0; rank < topology.world(); ++rank) {
            NcclFabricParams& own = params_->ranks[rank];
            own = {heap,
                   {rank, topology.world(), rank, topology.world(), contexts, signals, &gin_},
                   this,
                   &signal_resets_[rank],
                   {}};
            for (int local = 0; local < topology.ranks_per_node; ++local)
                own.node[local] = heaps[topology.rank(topology.node_of(rank), local)];
        }
    }
    const Params& params() const { return *params_; }

    // When all have reset their signals, nothing is under way and all flags of the network read 0.
    void check_reset_signals(uint64_t seed) {
        if (heap_.topology.nodes == 1) return;
        const size_t used = count_flags();
        simt::run(heap_.topology.world(), 1, 32, seed, [&] {
            reset_signals_kernel(params_->ranks[blockIdx.x], static_cast<int>(blockIdx.x),
                                 20'000'000'000);
        });
        for (const NcclSignalReset& reset : signal_resets_) {
            if (reset.absent) simt::die("a rank did not reset its signals");
        }
        if (gin_.network.deliver(gin_.random))
            simt::die("something arrives after all have reset their signals");
        if (!used || count_flags()) simt::die("flags are not cleared");
    }

  private:
    size_t count_flags() const {
        size_t used = 0;
        const size_t signals = NcclFabricParams::signals(heap_);
        for (const auto& words : gin_.signals) {
            for (size_t i = 0; i < words.size(); ++i)
                used += i % signals < heap_.network_flags() && words[i] != 0;
        }
        return used;
    }

    Heap heap_;
    simt::Gin gin_;
    std::vector<NcclSignalReset> signal_resets_;
    std::unique_ptr<Params> params_;
};

}  // namespace ep
