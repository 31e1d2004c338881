#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/queue/entry.h"
#include "fabric/verbs/queue_pair.h"

namespace ep::verbs {

// A queue pair in whose ring ranks post directly, and whose bell they ring: its memory is that of
// the card's driver. libibverbs neither posts nor polls.
class DirectPair : public QueuePair {
  public:
    // card: a direct one. depth: most entries in flight. Throws std::runtime_error with what fails.
    DirectPair(std::shared_ptr<Card> card, uint32_t depth);

    struct Rings {
        SendEntry* entries;
        uint32_t entry_count;  // a power of two, like the other count
        uint64_t* doorbell;    // DoorbellRecord
        uint64_t* bell;
        Completion* completions;
        uint32_t completion_count;
        uint32_t number;       // 24 bits
        uint32_t scratch_key;  // of eight bytes at 0, where additions leave the old value
    };
    const Rings& rings() const { return rings_; }

    // Whether all that was posted is over.
    bool is_idle() const;
    // Why what was posted last has failed, or "". The last entry shows any error, because a card
    // gives up all entries after one that fails.
    std::string fault() const;

    // Keeps an object as long as the rings.
    void keep(std::shared_ptr<const void> what) { kept_.push_back(std::move(what)); }

  private:
    const Completion* last_completion() const;

    Rings rings_;
    std::vector<std::shared_ptr<const void>> kept_;  // destroyed before the rings
};

}  // namespace ep::verbs
