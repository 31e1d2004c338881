// The normal mode's fabric in virtual time.
#pragma once

#include <cstring>

#include "core/heap.h"
#include "core/row.h"
#include "fabric/fabric.h"
#include "tools/simulate/heaps.h"

namespace ep {

// What the normal mode's fabric needs to know of the heap if only `simulated` of its nodes exist.
struct NodeImages {
    int simulated;
    Heap heap;
    RowFormat format;
};

// Fabric of the normal mode in virtual time: stores within a node, and between nodes stores
// (kMapped) or network cards. What is put to an image of a node goes into another ring there
// (heaps.h). That permutes rings and nodes: how many rows each carries, in which order and with
// which credit, stays as with all nodes.
template <bool kMapped>
class VirtualFabric : public VirtualHeaps {
  public:
    static constexpr bool kMapsAll = kMapped;
    static constexpr bool kOrdersWarps = kMapped;

    VirtualFabric(VirtualCluster& cluster, VirtualCards& cards, int rank, const NodeImages& images,
                  bool charges_loads = false)
        : VirtualHeaps(cluster, cards, images.heap.topology, rank, charges_loads),
          images_(images) {}

    template <class W>
    void put_to(W& warp, int channel, int rank, size_t dst, size_t src, size_t bytes) {
        if constexpr (kMapped) {
            warp.template copy<CacheHint::Keep>(at<char>(rank, dst), own<char>(src), bytes);
        } else {
            warp.finish_writes();
            const int node = topology_.node_of(rank);
            const Image image = image_of(node);
            const Heap& heap = images_.heap;
            const bool is_rows = dst >= heap.rdma_data(0, 0, 1);
            char* to = memory(image) + dst +
                       (is_rows ? image.rings * static_cast<long>(heap.rdma_ring_bytes)
                                : image.shift * static_cast<long>(heap.node_block_bytes()));
            std::memcpy(to, own<char>(src), bytes);
            if (is_rows && image.node != node) shift_rows(to, bytes, image.node - node);
            const auto rows = static_cast<double>(bytes / images_.format.slot_bytes());
            post(warp, channel, image.node, node,
                 is_rows ? rows * cluster_.row.real_slot : static_cast<double>(bytes));
        }
    }
    template <class W>
    void signal_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        if constexpr (kMapped) {
            warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);
        } else {
            warp.finish_writes();
            post_flag(warp, channel, topology_.node_of(rank), flag, to - from);
        }
    }
    template <class W>
    void credit_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        if constexpr (kMapped) {
            warp.template credit<Scope::System>(at<uint64_t>(rank, flag), to);
        } else {
            post_flag(warp, channel, topology_.node_of(rank), flag, to - from);
        }
    }

  private:
    // The node that stands for another one, and the nodes and rings by which the source is shifted
    // there (see heaps.h).
    struct Image {
        int node;
        long shift, rings;
    };
    Image image_of(int node) const {
        const int from = topology_.node_of(rank_);
        const auto [to, shift] = NodeImage::of(topology_, images_.simulated, from, node);
        const auto ring = [](long source, int owner) { return source - (source > owner); };
        return {to, shift, ring(from + shift, to) - ring(from, node)};
    }

    char* memory(const Image& image) const {
        return cluster_.heaps[topology_.rank(image.node, topology_.local_of(rank_))];
    }

    void shift_rows(char* rows, size_t bytes, int nodes) const {
        for (size_t row = 0; row < bytes; row += images_.format.slot_bytes()) {
            shift_experts(reinterpret_cast<int32_t*>(rows + row + images_.format.experts()),
                          images_.format.topk, nodes, images_.heap.num_experts, topology_);
        }
    }

    template <class W>
    void post_flag(W& warp, int channel, int node, size_t flag, uint64_t add) {
        const Image image = image_of(node);
        char* there = memory(image) + flag + image.shift * static_cast<long>(Heap::kLine);
        post(warp, channel, image.node, node, VirtualCards::kFlagBytes,
             reinterpret_cast<uint64_t*>(there), add);
    }
    template <class W>
    void post(W& warp, int channel, int to_node, int node, double bytes, uint64_t* flag = nullptr,
              uint64_t add = 0) {
        const int to = topology_.rank(to_node, topology_.local_of(rank_));
        cards_.post(warp.fiber(), {to, channel * topology_.nodes + node, bytes, flag, add});
    }

    const NodeImages& images_;
};
static_assert(FabricLike<VirtualFabric<false>, VirtualWarp> &&
              FabricLike<VirtualFabric<true>, VirtualWarp>);

}  // namespace ep
