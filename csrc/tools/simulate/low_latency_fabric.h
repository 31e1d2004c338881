// The low-latency mode's fabric in virtual time.
#pragma once

#include <cstring>
#include <vector>

#include "core/low_latency_heap.h"
#include "fabric/fabric.h"
#include "tools/simulate/heaps.h"

namespace ep {

// What the low-latency fabric needs to know of the heap if only `simulated` of its nodes exist.
struct LowLatencyImages {
    int simulated;
    LowLatencyHeap heap;
    size_t header_bytes;  // of a row, before its payload, which is not read
};

// Fabric of the low-latency mode in virtual time: stores within a node, or to all ranks (maps_all),
// and network cards to the others. What is put to an image of a node goes to the place of another
// source there (heaps.h).
class VirtualLowLatencyFabric : public VirtualHeaps {
  public:
    static constexpr bool kOrdersWarps = true;  // a channel's puts to a rank share a queue pair
    static constexpr bool kKeepsLines = false;  // rows have flags, also where GPUs use lines
    static constexpr bool kMapsAll = false;

    VirtualLowLatencyFabric(VirtualCluster& cluster, VirtualCards& cards, int rank,
                            const LowLatencyImages& images, bool maps_all)
        : VirtualHeaps(cluster, cards, images.heap.topology, rank, images.simulated, maps_all,
                       true),
          images_(images) {}

    template <class W, class ChannelOf>
    void put_each(W& warp, uint32_t lanes, const PerLane<W, int>& rank, ChannelOf&& channel_of,
                  size_t dst, const PerLane<W, size_t>& src, size_t bytes) {
        warp.finish_writes();
        std::vector<Message> messages;
        for_each_lane(lanes, [&](int lane) {
            messages.push_back(put_of(channel_of(rank[lane]), rank[lane], dst, src[lane], bytes));
        });
        post(warp, messages);
    }
    template <class W, class ChannelOf>
    void signal_each(W& warp, int first, uint32_t ranks, ChannelOf&& channel_of, size_t flag,
                     const PerLane<W, uint64_t>& from, uint64_t to) {
        warp.finish_writes();
        post_each(warp, first, ranks, channel_of, flag, [&](int lane) { return to - from[lane]; });
    }
    template <class W>
    void credit_each(W& warp, int first, uint32_t ranks, int channel, size_t flag, uint64_t from,
                     uint64_t to) {
        post_each(
            warp, first, ranks, [&](int) { return channel; }, flag, [&](int) { return to - from; });
    }

  private:
    // Where the rank that stands for `rank` has what lies at an offset for this rank.
    char* there(const NodeImage& image, int rank, size_t offset) const {
        const LowLatencyHeap& heap = images_.heap;
        const long ranks = image.source * topology_.ranks_per_node;
        size_t stride = 0;  // 0 for what combine puts, which lies where its token is at home
        if (offset < heap.choices(0, 0)) {
            stride = LowLatencyHeap::kLine;
        } else if (offset < heap.row(0, 0, 0)) {
            stride = heap.choice_bytes();
        } else if (offset < heap.part(0, 0, 0, 0, 0)) {
            stride = heap.row(0, 1, 0) - heap.row(0, 0, 0);
        }
        return at<char>(rank_of(image, rank), offset + ranks * static_cast<long>(stride));
    }

    // Shifts the experts that a rank's choices name.
    void shift_choices(char* to, size_t bytes, int rank, const NodeImage& image) const {
        const LowLatencyHeap& heap = images_.heap;
        const size_t first = heap.chosen_experts();
        shift_experts(reinterpret_cast<int32_t*>(to + first), (bytes - first) / sizeof(int32_t),
                      image.node - topology_.node_of(rank), heap.num_experts, topology_);
    }

    // Posts for all lanes at once.
    template <class W, class ChannelOf, class IncrementOf>
    void post_each(W& warp, int first, uint32_t ranks, ChannelOf&& channel_of, size_t flag,
                   IncrementOf&& increment_of) {
        std::vector<Message> messages;
        for_each_lane(ranks, [&](int lane) {
            const int rank = first + lane;
            messages.push_back(flag_of(channel_of(rank), rank, flag, increment_of(lane)));
        });
        post(warp, messages);
    }
    Message put_of(int channel, int rank, size_t dst, size_t src, size_t bytes) const override {
        const NodeImage image = image_of(rank);
        char* to = there(image, rank, dst);
        const bool is_row = dst >= images_.heap.row(0, 0, 0);
        std::memcpy(to, at<char>(rank_, src), is_row ? images_.header_bytes : bytes);
        if (!is_row && image.node != topology_.node_of(rank)) shift_choices(to, bytes, rank, image);
        return {rank_of(image, rank), pair_of(channel, rank), static_cast<double>(bytes), nullptr,
                0};
    }
    Message flag_of(int channel, int rank, size_t flag, uint64_t add) const override {
        const NodeImage image = image_of(rank);
        return {rank_of(image, rank), pair_of(channel, rank), VirtualCards::kFlagBytes,
                reinterpret_cast<uint64_t*>(there(image, rank, flag)), add};
    }
    int pair_of(int channel, int rank) const { return channel * topology_.world() + rank; }

    const LowLatencyImages& images_;
};
static_assert(ReachesAllRanks<VirtualLowLatencyFabric, VirtualWarp>);

}  // namespace ep
