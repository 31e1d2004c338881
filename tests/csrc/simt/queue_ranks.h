#pragma once

#include <memory>
#include <vector>

#include "core/heap.h"
#include "core/low_latency_heap.h"
#include "fabric/queue/queue_fabric.h"
#include "order.h"
#include "queue_cards.h"
#include "simt.h"

namespace ep {

// Every rank has parameters of its own: in a grid of all ranks they travel together.
class RankFabric;
struct RankFabricParams {
    using Fabric = RankFabric;
    QueueFabricParams ranks[9];
};
class RankFabric : public QueueFabric {
  public:
    RankFabric(const RankFabricParams& params, int rank) : QueueFabric(params.ranks[rank], rank) {}
};

// The ranks of a grid, over send queues of small depths, whose network reaches other memory than
// their heaps.
class Ranks {
  public:
    using Params = RankFabricParams;
    static constexpr bool kOverHost = true;

    template <class AnyHeap>
    Ranks(const AnyHeap& heap, const std::vector<char*>& heaps, uint64_t seed)
        : params_(std::make_unique<Params>()) {
        const Topology& topology = heap.topology;
        const int world = topology.world();
        const size_t begin = heap.network_begin(), bytes = heap.bytes() - begin;
        const uint32_t depth = 2 << seed % 3;
        const size_t count = SendQueues::count(world, heap.channels);
        std::vector<SendQueues> queues;
        std::vector<char*> regions;
        for (int rank = 0; rank < world; ++rank) {
            regions.push_back(take(bytes, "a network's region"));
            auto* producers = reinterpret_cast<SendQueue::Producer*>(
                take(count * sizeof(SendQueue::Producer), "producers"));
            queues.push_back(SendQueues::over(take(SendQueues::bytes(count, depth), "queues"),
                                              producers, world, heap.channels, depth, 3, nullptr));
            QueueFabricParams& own = params_->ranks[rank];
            own.topology = topology;
            own.network = regions.back();
            own.network_begin = begin;
            own.network_bytes = bytes;
            own.queues = queues.back();
            for (int local = 0; local < topology.ranks_per_node; ++local)
                own.node[local] = heaps[topology.rank(topology.node_of(rank), local)];
        }
        cards_ = std::make_unique<simt::QueueCards>(queues, regions, bytes, seed);
        simt::background = [this] { cards_->step(); };
    }
    ~Ranks() {
        simt::background = nullptr;
        for (const auto& memory : memory_) simt::order::forget(memory.data());
    }
    Ranks(const Ranks&) = delete;
    const Params& params() const { return *params_; }
    void begin_launch() {}
    void check_reset_signals(uint64_t) {}
    // After so many entries.
    void stop_cards(int entries) { cards_->left = static_cast<uint64_t>(entries); }

  private:
    struct alignas(256) Line {
        char bytes[256];
    };
    char* take(size_t bytes, const char* name) {
        memory_.emplace_back(bytes / sizeof(Line) + 1);
        simt::order::track(memory_.back().data(), bytes, name);
        return reinterpret_cast<char*>(memory_.back().data());
    }

    std::unique_ptr<Params> params_;
    std::vector<std::vector<Line>> memory_;
    std::unique_ptr<simt::QueueCards> cards_;
};

}  // namespace ep
