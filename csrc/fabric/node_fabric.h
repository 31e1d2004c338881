#pragma once

#include <cstddef>

#include "core/function.h"

namespace ep {

// What fabrics share whose ranks load and store the memory of their node: P's `node` has the heaps.
template <class P>
class NodeFabric {
  public:
    static constexpr bool kKeepsLines = false;
    static constexpr bool kMapsAll = false;

    EP_FN NodeFabric(const P& params, int rank)
        : params_(params), node_(params.topology.node_of(rank)) {}

    template <class T>
    EP_FN T* peer(int local, size_t offset) const {
        return reinterpret_cast<T*>(params_.node[local] + offset);
    }
    EP_FN bool maps(int rank) const { return params_.topology.node_of(rank) == node_; }
    template <class T>
    EP_FN T* at(int rank, size_t offset) const {
        return peer<T>(params_.topology.local_of(rank), offset);
    }

  protected:
    const P& params_;
    int node_;
};

}  // namespace ep
