// The flags that other nodes write: each has a number of its own, and the numbers have no gaps.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/heap.h"
#include "core/low_latency_heap.h"

namespace {

constexpr int kRank = 3;

class Numbers {
  public:
    explicit Numbers(const ep::NetworkFlags& flags) : flags_(flags), used_(flags.count()) {}

    // Of the heap of kRank.
    void take(size_t flag, int writer, int channel) {
        const size_t number = flags_.number(flag);
        const bool fits = number < used_.size() && !used_[number]++ &&
                          flags_.writer(number) == writer &&
                          flags_.channel(number, kRank) == channel;
        if (!fits) {
            std::fprintf(stderr, "%d writers, %d channels: flag at %zu has number %zu of %zu\n",
                         flags_.writers, flags_.channels, flag, number, used_.size());
            std::exit(EXIT_FAILURE);
        }
        ++taken_;
    }
    ~Numbers() {
        if (taken_ == used_.size()) return;
        std::fprintf(stderr, "%d writers, %d channels: numbers have gaps\n", flags_.writers,
                     flags_.channels);
        std::exit(EXIT_FAILURE);
    }

  private:
    ep::NetworkFlags flags_;
    std::vector<int> used_;
    size_t taken_ = 0;
};

void take_flags(const ep::Heap& heap) {
    Numbers numbers(heap.network_flags());
    for (int node = 0; node < heap.topology.nodes; ++node) {
        numbers.take(heap.notify_rail_flag(node), node, heap.channels);
        for (int channel = 0; channel < heap.channels; ++channel) {
            numbers.take(heap.rdma_tail(channel, node), node, channel);
            numbers.take(heap.rdma_head(channel, node), node, channel);
        }
    }
}

void take_flags(const ep::LowLatencyHeap& heap) {
    using enum ep::LowLatencyKind;
    Numbers numbers(heap.network_flags());
    for (int rank = 0; rank < heap.topology.world(); ++rank) {
        for (const ep::LowLatencyKind kind : {Dispatch, Combine}) {
            for (int bank = 0; bank < ep::LowLatencyHeap::kBanks; ++bank)
                numbers.take(heap.released(kind, bank, rank), rank, heap.channels);
            numbers.take(heap.row_flag(kind, 0, rank), rank, (kRank + rank) % heap.channels);
        }
        for (int part = 0; part < heap.choice_parts(); ++part)
            numbers.take(heap.choice_flag(rank, part), rank, heap.channels);
        if (!heap.masking) continue;
        numbers.take(heap.masked_flag(rank), rank, heap.channels);
        numbers.take(heap.heartbeat_flag(rank), rank, heap.channels);
    }
}

}  // namespace

int main() {
    for (int nodes : {2, 3, 4, 33, 64}) {
        for (int ranks : {1, 2, 3, 8, 72}) {
            for (int channels : {1, 2, 7, 48}) {
                const int world = nodes * ranks;
                take_flags(ep::Heap{{nodes, ranks}, world, channels, 1024, 1024});
                for (const bool masking : {false, true}) {
                    take_flags(ep::LowLatencyHeap{
                        {nodes, ranks}, 40 * world, 3, 2, 256, true, channels, masking});
                }
            }
        }
    }
    const ep::Heap alone{{1, 8}, 8, 4, 1024, 1024};
    const ep::LowLatencyHeap near{{1, 8}, 8, 3, 2, 256, false, 1};
    if (alone.network_flags().count() || near.network_flags().count())
        return std::fprintf(stderr, "one node has network flags\n"), EXIT_FAILURE;

    // node 1 of 3 nodes with 2 ranks is ranks 2 and 3
    const ep::Topology topology{3, 2};
    const bool within = topology.node_is_within(3, 2, 2) && topology.node_is_within(2, 0, 6) &&
                        topology.node_is_within(2, 0, 4) && !topology.node_is_within(2, 3, 2) &&
                        !topology.node_is_within(2, 2, 1) && !topology.node_is_within(3, 0, 3);
    if (!within) return std::fprintf(stderr, "node_is_within is wrong\n"), EXIT_FAILURE;
    return EXIT_SUCCESS;
}
