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
                  bool charges_loads)
        : VirtualHeaps(cluster, cards, images.heap.topology, rank, images.simulated, kMapped,
                       charges_loads),
          images_(images) {}

  private:
    Message put_of(int channel, int rank, size_t dst, size_t src, size_t bytes) const override {
        const NodeImage image = image_of(rank);
        const int node = topology_.node_of(rank);
        const Heap& heap = images_.heap;
        const bool is_rows = dst >= heap.rdma_data(0, 0, 1);
        char* to = at<char>(rank_of(image, rank), dst) +
                   (is_rows ? rings_shifted(image, node) * static_cast<long>(heap.rdma_ring_bytes)
                            : image.source * static_cast<long>(heap.node_block_bytes()));
        std::memcpy(to, own<char>(src), bytes);
        if (is_rows && image.node != node) shift_rows(to, bytes, image.node - node);
        const auto rows = static_cast<double>(bytes / images_.format.slot_bytes());
        return {rank_of(image, rank), channel * topology_.nodes + node,
                is_rows ? rows * cluster_.row.real_slot : static_cast<double>(bytes), nullptr, 0};
    }
    Message flag_of(int channel, int rank, size_t flag, uint64_t add) const override {
        const NodeImage image = image_of(rank);
        const long shift = image.source * static_cast<long>(Heap::kLine);
        return {rank_of(image, rank), channel * topology_.nodes + topology_.node_of(rank),
                VirtualCards::kFlagBytes, at<uint64_t>(rank_of(image, rank), flag + shift), add};
    }

    // Rings by which the source is shifted there.
    long rings_shifted(const NodeImage& image, int node) const {
        const int from = topology_.node_of(rank_);
        const auto ring = [](long source, int owner) { return source - (source > owner); };
        return ring(from + image.source, image.node) - ring(from, node);
    }

    void shift_rows(char* rows, size_t bytes, int nodes) const {
        for (size_t row = 0; row < bytes; row += images_.format.slot_bytes()) {
            shift_experts(reinterpret_cast<int32_t*>(rows + row + images_.format.experts()),
                          images_.format.topk, nodes, images_.heap.num_experts, topology_);
        }
    }

    const NodeImages& images_;
};
static_assert(FabricLike<VirtualFabric<false>, VirtualWarp> &&
              FabricLike<VirtualFabric<true>, VirtualWarp>);

}  // namespace ep
