// The flags that other nodes write: each has a number of its own, and the numbers have no gaps.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/heap.h"

namespace {

int count_flags(const ep::Heap& heap) {
    std::vector<int> used(heap.network_flags(), 0);
    int flags = 0;
    auto take = [&](size_t flag, int node, int channel) {
        const size_t number = heap.network_flag(flag);
        if (number >= used.size() || used[number]++ || heap.network_flag_node(number) != node ||
            heap.network_flag_channel(number) != channel) {
            std::fprintf(stderr, "%d x %d, %d channels: flag at %zu has number %zu of %zu\n",
                         heap.topology.nodes, heap.topology.ranks_per_node, heap.channels, flag,
                         number, used.size());
            std::exit(EXIT_FAILURE);
        }
        ++flags;
    };
    for (int node = 0; node < heap.topology.nodes; ++node) {
        take(heap.notify_rail_flag(node), node, heap.channels);
        for (int channel = 0; channel < heap.channels; ++channel) {
            take(heap.rdma_tail(channel, node), node, channel);
            take(heap.rdma_head(channel, node), node, channel);
        }
    }
    return flags;
}

}  // namespace

int main() {
    for (int nodes : {2, 3, 4, 33, 64}) {
        for (int ranks : {1, 2, 3, 8, 72}) {
            for (int channels : {1, 2, 7, 48}) {
                const ep::Heap heap{{nodes, ranks}, nodes * ranks, channels, 1024, 1024};
                if (count_flags(heap) != static_cast<int>(heap.network_flags())) {
                    std::fprintf(stderr, "%d x %d, %d channels: numbers have gaps\n", nodes, ranks,
                                 channels);
                    return EXIT_FAILURE;
                }
            }
        }
    }
    const ep::Heap alone{{1, 8}, 8, 4, 1024, 1024};
    if (alone.network_flags() != 0)
        return std::fprintf(stderr, "one node has network flags\n"), EXIT_FAILURE;

    // node 1 of 3 nodes with 2 ranks is ranks 2 and 3
    const ep::Topology topology{3, 2};
    const bool within = topology.node_is_within(3, 2, 2) && topology.node_is_within(2, 0, 6) &&
                        topology.node_is_within(2, 0, 4) && !topology.node_is_within(2, 3, 2) &&
                        !topology.node_is_within(2, 2, 1) && !topology.node_is_within(3, 0, 3);
    if (!within) return std::fprintf(stderr, "node_is_within is wrong\n"), EXIT_FAILURE;
    return EXIT_SUCCESS;
}
