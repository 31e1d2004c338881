#pragma once

#include "core/function.h"

namespace ep {

// Ranks of the largest NVLink domain, and most ranks of one machine that share memory.
constexpr int kMaxNodeRanks = 72;

// Nodes of equal size. A rank is node * ranks_per_node + local; a rail has the ranks of one local
// index.
struct Topology {
    int nodes;
    int ranks_per_node;

    EP_HD int world() const { return nodes * ranks_per_node; }
    EP_HD int rank(int node, int local) const { return node * ranks_per_node + local; }
    EP_HD int node_of(int rank) const { return rank / ranks_per_node; }
    EP_HD int local_of(int rank) const { return rank % ranks_per_node; }
    // Whether all ranks of this rank's node are among `count` ranks from `first` on.
    EP_HD bool node_is_within(int rank, int first, int count) const {
        const int first_of_node = this->rank(node_of(rank), 0);
        return first <= first_of_node && first_of_node + ranks_per_node <= first + count;
    }
};

}  // namespace ep
