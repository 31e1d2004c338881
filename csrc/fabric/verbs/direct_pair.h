#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/queue/entry.h"
#include "fabric/verbs/queue_pair.h"

namespace ep::verbs {

// A queue pair whose entries ranks write into its ring by themselves, and whose bell they ring:
// its memory is where the card's driver has it. Nobody asks libibverbs to post or to poll.
class DirectPair : public QueuePair {
  public:
    // card: one that is direct. depth: entries that are under way at most. Throws
    // std::runtime_error with what fails.
    DirectPair(std::shared_ptr<Card> card, uint32_t depth);

    struct Rings {
        SendEntry* entries;
        uint32_t entry_count;  // a power of two, as the other one
        uint64_t* doorbell;    // DoorbellRecord
        uint64_t* bell;
        Completion* completions;
        uint32_t completion_count;
        uint32_t number;       // 24 bits
        uint32_t scratch_key;  // of eight bytes at 0, where additions leave what was there
    };
    const Rings& rings() const { return rings_; }

    // Whether all that was posted is over.
    bool is_idle() const;
    // "" or why what was posted last has failed: an error is never alone, because a card gives up
    // all that is behind it.
    std::string fault() const;

    // For as long as the rings are there.
    void keep(std::shared_ptr<const void> what) { kept_.push_back(std::move(what)); }

  private:
    const Completion* last_completion() const;

    Rings rings_;
    std::vector<std::shared_ptr<const void>> kept_;  // gone before the rings are
};

}  // namespace ep::verbs
