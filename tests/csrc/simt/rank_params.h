#pragma once

#include <algorithm>
#include <vector>

#include "core/topology.h"

namespace ep {

// Every rank has parameters of its own: in a grid of all ranks they travel together.
template <class Params>
struct RankParams {
    struct Fabric : Params::Fabric {
        Fabric(const RankParams& params, int rank) : Params::Fabric(params.ranks[rank], rank) {}
    };
    Params ranks[9];
};

// The heaps of a rank's node.
template <class Params>
void map_node(Params& params, const Topology& topology, const std::vector<char*>& heaps, int rank) {
    std::copy_n(&heaps[topology.rank(topology.node_of(rank), 0)], topology.ranks_per_node,
                params.node);
}

}  // namespace ep
