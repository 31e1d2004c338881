#pragma once

#include <mutex>
#include <stdexcept>

namespace ep {

// For the launches of a buffer: two at once would share its rings.
class ExclusiveCall {
  public:
    // Throws std::runtime_error while another thread has what this returned.
    std::unique_lock<std::mutex> enter() {
        std::unique_lock lock(busy_, std::try_to_lock);
        if (!lock) throw std::runtime_error("the buffer is in use by another thread");
        return lock;
    }

  private:
    std::mutex busy_;
};

}  // namespace ep
