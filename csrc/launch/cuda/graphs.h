#pragma once

#include <atomic>
#include <memory>

#include "launch/cuda/resource.h"

namespace ep {

// Counts the CUDA graphs that have captured launches of a buffer and may still replay them.
class CudaGraphs {
  public:
    // If the stream is being captured, counts its graph until the graph and all its instances are
    // destroyed and have finished. Throws std::runtime_error if CUDA fails.
    void note(CudaStream stream);
    int alive() const { return *alive_; }

  private:
    std::shared_ptr<std::atomic<int>> alive_ = std::make_shared<std::atomic<int>>(0);
    unsigned long long noted_ = 0;  // id of the last capture counted, unique in the process
};

}  // namespace ep
