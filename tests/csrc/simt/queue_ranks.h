#pragma once

#include <bit>
#include <memory>
#include <vector>

#include "../tensor.h"
#include "core/heap.h"
#include "core/low_latency_heap.h"
#include "fabric/queue/queue_fabric.h"
#include "queue_cards.h"
#include "rank_params.h"
#include "simt.h"

namespace ep {

// The ranks of a grid, over send queues of small depths, whose network reaches other memory than
// their heaps: what carries them out looks at their doorbells, or, as the seed has it, is a card
// that has a bell.
class Ranks {
  public:
    using Params = RankParams<QueueFabricParams>;
    using Queues = simt::QueueCards::Queues;
    static constexpr bool kOverHost = true;

    template <class AnyHeap>
    Ranks(const AnyHeap& heap, const std::vector<char*>& heaps, uint64_t seed)
        : params_(std::make_unique<Params>()) {
        const Topology& topology = heap.topology;
        const int world = topology.world();
        const size_t begin = heap.network_begin(), bytes = heap.network_bytes();
        const uint32_t depth = 2 << seed % 3;
        const size_t count = Queues::count(world, heap.channels);
        std::vector<Queues> queues;
        std::vector<char*> regions;
        for (int rank = 0; rank < world; ++rank) {
            regions.push_back(take<char>(bytes));
            queues.push_back(Queues::over(take<char>(Queues::bytes(count, depth)),
                                          take<QueueProducer>(count), world, heap.channels, depth,
                                          3, nullptr));
            QueueFabricParams& own = params_->ranks[rank];
            own.topology = topology;
            own.network = regions.back();
            own.network_begin = begin;
            own.network_bytes = bytes;
            if (seed / 3 % 2) queues.back().cards = take_card(queues.back());
            own.queues = queues.back();
            map_node(own, topology, heaps, rank);
        }
        cards_ = std::make_unique<simt::QueueCards>(queues, regions, bytes, seed);
        simt::background = [this] { cards_->step(); };
    }
    ~Ranks() { simt::background = nullptr; }
    Ranks(const Ranks&) = delete;
    const Params& params() const { return *params_; }
    void begin_launch() {}
    void check_reset_signals(uint64_t) {}
    // After so many entries.
    void stop_cards(int entries) { cards_->left = static_cast<uint64_t>(entries); }

  private:
    template <class T>
    T* take(size_t count) {
        return reinterpret_cast<T*>(memory_.emplace_back(count * sizeof(T)).data());
    }

    // The queues of a rank as a driver makes them, in rings larger than they are deep.
    const CardQueue* take_card(const Queues& queues) {
        const size_t count = queues.count();
        const uint32_t depth = queues.depth;
        auto* entries = take<SendEntry>(count * 2 * depth);
        auto* completions = take<Completion>(count * 4 * depth);
        auto* words = take<uint64_t>(count * 2);  // doorbells, then bells
        auto* cards = take<CardQueue>(count);
        for (uint32_t i = 0; i < count; ++i) {
            cards[i] = {entries + i * 2 * depth,
                        words + i,
                        words + count + i,
                        completions + i * 4 * depth,
                        2 * depth - 1,
                        4 * depth - 1,
                        static_cast<uint32_t>(std::countr_zero(4 * depth)),
                        0x800000 + i,
                        simt::QueueCards::kData,
                        simt::QueueCards::kFlags,
                        simt::QueueCards::kSource,
                        {simt::QueueCards::kScratch, 8 * i},
                        queues.producers + i};
        }
        return cards;
    }

    std::unique_ptr<Params> params_;
    std::vector<Tensor<char>> memory_;
    std::unique_ptr<simt::QueueCards> cards_;
};

}  // namespace ep
