#pragma once

#include <cstddef>
#include <cstdint>

#include "core/topology.h"

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

}  // namespace ep
