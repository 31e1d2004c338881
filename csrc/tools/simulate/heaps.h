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

// The heaps of all simulated ranks as one of them reaches them, and its network card.
class VirtualHeaps {
  public:
    // charges_loads: a lane's loads from its own heap take time (see VirtualWarp::lanes).
    VirtualHeaps(VirtualCluster& cluster, VirtualCards& cards, const Topology& topology, int rank,
                 bool charges_loads)
        : cluster_(cluster),
          cards_(cards),
          topology_(topology),
          rank_(rank),
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
    template <class T>
    T* at(int rank, size_t offset) const {
        return reinterpret_cast<T*>(cluster_.heaps[rank] + offset);
    }
    template <class W>
    uint64_t acquire_signal(int, size_t flag) const {
        return W::template acquire<Scope::System>(at<uint64_t>(rank_, flag));
    }

  protected:
    VirtualCluster& cluster_;
    VirtualCards& cards_;
    Topology topology_;
    int rank_;

  private:
    bool charges_loads_;
};

}  // namespace ep
