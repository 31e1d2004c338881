#pragma once

#include <atomic>
#include <memory>

#include "launch/cuda/stream.h"

namespace ep {

// The CUDA graphs that have captured launches of a buffer and may still replay them.
class CudaGraphs {
  public:
    // If the stream is being captured, its graph counts from now on, until it and all that was
    // instantiated from it are destroyed and done. Throws std::runtime_error.
    void note(CudaStream stream);
    int alive() const { return *alive_; }

  private:
    std::shared_ptr<std::atomic<int>> alive_ = std::make_shared<std::atomic<int>>(0);
    unsigned long long noted_ = 0;  // the last capture: no two of a process have the same number
};

}  // namespace ep
