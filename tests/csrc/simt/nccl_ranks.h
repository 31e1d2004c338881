#pragma once

#include "fabric/nccl/nccl_fabric.h"
#include "launch/nccl/reset_signals.h"
#include "rank_params.h"
#include "simt.h"

namespace ep {

// The ranks of a grid, over NCCL's interface.
class Ranks {
  public:
    using Params = RankParams<NcclFabricParams>;
    static constexpr bool kOverHost = false;

    template <class AnyHeap>
    Ranks(const AnyHeap& heap, const std::vector<char*>& heaps, uint64_t seed)
        : topology_(heap.topology),
          sent_(heaps.size(), std::vector<uint64_t>(heap.network_flags().count())),
          absent_(heaps.size()),
          params_(std::make_unique<Params>()) {
        const Topology& topology = heap.topology;
        const int signals = static_cast<int>(NcclFabricParams::signals(heap.network_flags()));
        const int contexts = signals ? simt::Gin::kContexts : 0;
        gin_.random.seed(seed);
        gin_.heaps = heaps;
        gin_.signals.assign(heaps.size(), std::vector<uint64_t>(contexts * signals));
        for (int rank = 0; rank < topology.world(); ++rank) {
            NcclFabricParams& own = params_->ranks[rank];
            own = {topology,
                   heap.network_flags(),
                   {rank, topology.world(), rank, topology.world(), contexts, signals, &gin_},
                   this,
                   sent_[rank].data(),
                   &absent_[rank],
                   nullptr,
                   {}};
            map_node(own, topology, heaps, rank);
        }
    }
    const Params& params() const { return *params_; }

    void begin_launch() {}

    // When all have reset their signals, of which many were under way, nothing is under way any
    // more and all signals read 0; that can be done again.
    void check_reset_signals(uint64_t seed) {
        if (topology_.nodes == 1) return;
        if (!signals_in_use()) simt::die("no signal was used");
        for (int round = 0; round < 2; ++round) {
            simt::run(topology_.world(), 1, 32, seed + round, [&] {
                const int rank = static_cast<int>(blockIdx.x);
                send_credits(rank);
                reset_signals_kernel(params_->ranks[rank], rank, 20'000'000'000);
            });
            for (const int absent : absent_) {
                if (absent) simt::die("a rank did not reset its signals");
            }
            if (gin_.network.deliver(gin_.random))
                simt::die("something arrives after all have reset their signals");
            if (signals_in_use()) simt::die("signals are not cleared");
        }
    }

  private:
    void send_credits(int rank) {
        const NcclFabricParams& own = params_->ranks[rank];
        for (size_t number = 0; number < own.flags.count(); ++number) {
            const int writer = own.flags.writer(number);
            for (int i = 0; i < 5 && !is_unused(own, rank, number); ++i) {
                nccl_signal(own, own.flags.channel(number, rank), own.rank_of(writer, rank),
                            static_cast<uint32_t>(number - writer + own.writer_of(rank)), 1);
            }
        }
    }
    bool signals_in_use() const {
        return std::any_of(gin_.signals.begin(), gin_.signals.end(), [](const auto& words) {
            return std::any_of(words.begin(), words.end(), [](uint64_t word) { return word != 0; });
        });
    }

    Topology topology_;
    simt::Gin gin_;
    std::vector<std::vector<uint64_t>> sent_;
    std::vector<int> absent_;
    std::unique_ptr<Params> params_;
};

}  // namespace ep
