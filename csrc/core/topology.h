#pragma once

#include "core/function.h"

namespace ep {

// Nodes of equally many ranks. A rank is node * ranks_per_node + local; a rail is the ranks of equal local index.
struct Topology {
    int nodes;
    int ranks_per_node;

    EP_HD int world() const { return nodes * ranks_per_node; }
    EP_HD int rank(int node, int local) const { return node * ranks_per_node + local; }
    EP_HD int node_of(int rank) const { return rank / ranks_per_node; }
    EP_HD int local_of(int rank) const { return rank % ranks_per_node; }
};

}  // namespace ep
