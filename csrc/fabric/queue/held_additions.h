#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>

#include "fabric/queue/link.h"

namespace ep {

// Additions of one rank over a network that keeps no order. The writes of a queue between two of
// its additions are a batch: each write names its batch, and the addition after it says how many
// they are. Additions of a queue are carried out in turn, each when its whole batch has arrived.
class HeldAdditions {
  public:
    // Takes a frame and calls carry_out(frame) for each addition whose turn has come. Returns false
    // if no rank sends such a frame.
    template <class F>
    bool take(const Frame& frame, F&& carry_out) {
        Queue& queue = queues_[static_cast<uint32_t>(frame.region) << 16 | frame.queue];
        if (frame.batch - queue.next >= kMaxAhead) return false;
        Batch& batch = queue.batches[frame.batch];
        if (frame.kind == Frame::kWrite) {
            ++batch.arrived;
        } else {
            if (batch.addition) return false;
            batch.addition = frame;
        }
        if (batch.addition && batch.arrived > batch.addition->writes) return false;
        for (auto first = queue.batches.find(queue.next); first != queue.batches.end();
             first = queue.batches.find(queue.next)) {
            const auto& [arrived, addition] = first->second;
            if (!addition || arrived < addition->writes) break;
            carry_out(*addition);
            queue.batches.erase(first);
            ++queue.next;
        }
        return true;
    }

  private:
    static constexpr uint32_t kMaxAhead = 1 << 12;  // batches that have begun: bounds memory

    struct Batch {
        uint32_t arrived = 0;
        std::optional<Frame> addition;
    };
    struct Queue {
        uint32_t next = 0;  // batch to carry out
        std::map<uint32_t, Batch> batches;
    };
    std::unordered_map<uint32_t, Queue> queues_;
};

}  // namespace ep
