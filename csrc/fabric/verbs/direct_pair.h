#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/queue/send_queue.h"
#include "fabric/verbs/queue_pair.h"

namespace ep::verbs {

// A queue pair in whose ring ranks post directly, and whose bell they ring: its memory is that of
// the card's driver. libibverbs neither posts nor polls.
class DirectPair : public QueuePair {
  public:
    // card: a direct one. depth: most entries in flight. Throws std::runtime_error with what fails.
    DirectPair(std::shared_ptr<Card> card, uint32_t depth);

    // A queue over its rings. Who posts there fills in the keys and the producer.
    const CardQueue& queue() const { return queue_; }

    // Whether all that was posted is over.
    bool is_idle() const;
    // Why what was posted last has failed, or "". The last entry shows any error, because a card
    // gives up all entries after one that fails.
    std::string fault() const;

    // Keeps an object as long as the rings.
    void keep(std::shared_ptr<const void> what) { kept_.push_back(std::move(what)); }

  private:
    const Completion* last_completion() const;

    CardQueue queue_{};
    std::vector<std::shared_ptr<const void>> kept_;  // destroyed before the rings
};

}  // namespace ep::verbs
