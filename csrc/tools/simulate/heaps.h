// What the fabrics of both modes in virtual time share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/topology.h"
#include "tools/simulate/card.h"
#include "tools/simulate/virtual_warp.h"

namespace ep {

// The first M of N nodes can stand for all, where M divides N: node n is the image of node n mod M,
// and does what that one does, with all nodes shifted alike. What a node sends to an image goes to
// the node that stands for it, as if it came from where the image sees it come from: the source,
// and the experts of rows, are shifted by as many nodes.
struct NodeImage {
    int node;     // the node that stands for it
    long source;  // nodes by which the source is shifted

    static NodeImage of(const Topology& topology, int simulated, int from, int node) {
        const int nodes = topology.nodes, to = node % simulated;
        return {to, ((to - (node - from)) % nodes + nodes) % nodes - from};
    }
};

// Shifts `count` ids of experts by `by_nodes` nodes; -1: none.
inline void shift_experts(int32_t* experts, size_t count, int by_nodes, int num_experts,
                          const Topology& topology) {
    const int by = by_nodes * (num_experts / topology.nodes);
    for (size_t i = 0; i < count; ++i) {
        if (experts[i] >= 0)
            experts[i] = ((experts[i] + by) % num_experts + num_experts) % num_experts;
    }
}

// A fabric in virtual time: the heaps of all simulated ranks as one of them reaches them, by stores
// or over its network card. The modes differ in where their images have what is put.
class VirtualHeaps {
  public:
    // simulated: number of nodes that exist. maps_all: stores reach all ranks. charges_loads: a
    // lane's loads from its own heap take time (see VirtualWarp::lanes).
    VirtualHeaps(VirtualCluster& cluster, VirtualCards& cards, const Topology& topology, int rank,
                 int simulated, bool maps_all, bool charges_loads)
        : cluster_(cluster),
          topology_(topology),
          rank_(rank),
          cards_(cards),
          simulated_(simulated),
          maps_all_(maps_all),
          charges_loads_(charges_loads) {}

    template <class T>
    T* own(size_t offset) const {
        if (charges_loads_) VirtualWarp::note_load();
        return at<T>(rank_, offset);
    }
    template <class T>
    T* network(size_t offset) const {
        return own<T>(offset);
    }
    template <class T>
    T* peer(int local, size_t offset) const {
        return at<T>(topology_.rank(topology_.node_of(rank_), local), offset);
    }
    bool maps(int rank) const {
        return maps_all_ || topology_.node_of(rank) == topology_.node_of(rank_);
    }
    template <class T>
    T* at(int rank, size_t offset) const {
        return reinterpret_cast<T*>(cluster_.heaps[rank] + offset);
    }
    template <class W>
    uint64_t acquire_signal(int, size_t flag) const {
        return W::template acquire<Scope::System>(at<uint64_t>(rank_, flag));
    }
    template <class W>
    void put_to(W& warp, int channel, int rank, size_t dst, size_t src, size_t bytes) {
        if (maps(rank))
            return warp.template copy<CacheHint::Keep>(at<char>(rank, dst), own<char>(src), bytes);
        warp.finish_writes();
        post(warp, put_of(channel, rank, dst, src, bytes));
    }
    template <class W>
    void signal_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        if (maps(rank)) return warp.template publish<Scope::System>(at<uint64_t>(rank, flag), to);
        warp.finish_writes();
        post(warp, flag_of(channel, rank, flag, to - from));
    }
    template <class W>
    void credit_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        if (maps(rank)) return warp.template credit<Scope::System>(at<uint64_t>(rank, flag), to);
        post(warp, flag_of(channel, rank, flag, to - from));
    }

  protected:
    using Message = VirtualCards::Message;

    // Copies what is put at once; only the message takes time.
    virtual Message put_of(int channel, int rank, size_t dst, size_t src, size_t bytes) const = 0;
    virtual Message flag_of(int channel, int rank, size_t flag, uint64_t add) const = 0;
    template <class W, class Messages>
    void post(W& warp, const Messages& messages) {
        cards_.post(warp.fiber(), messages);
    }

    NodeImage image_of(int rank) const {
        return NodeImage::of(topology_, simulated_, topology_.node_of(rank_),
                             topology_.node_of(rank));
    }
    // The rank that stands for `rank`.
    int rank_of(const NodeImage& image, int rank) const {
        return topology_.rank(image.node, topology_.local_of(rank));
    }

    VirtualCluster& cluster_;
    Topology topology_;
    int rank_;

  private:
    VirtualCards& cards_;
    int simulated_;
    bool maps_all_, charges_loads_;
};

}  // namespace ep
