#pragma once

#include "core/heap.h"
#include "fabric/cuda/p2p_fabric.h"
#include "simt.h"

namespace ep {

// The ranks of a grid, over heaps that are all mapped.
class Ranks {
  public:
    using Params = P2pFabricParams;
    static constexpr bool kOverHost = false;

    template <class AnyHeap>
    Ranks(const AnyHeap& heap, const std::vector<char*>& heaps, uint64_t) {
        params_.topology = heap.topology;
        std::copy(heaps.begin(), heaps.end(), params_.heaps);
    }
    const Params& params() const { return params_; }
    void begin_launch() {}
    void check_reset_signals(uint64_t) {}

  private:
    Params params_{};
};

}  // namespace ep
