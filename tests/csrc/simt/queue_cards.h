#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "fabric/queue/send_queue.h"

namespace simt {

// A network card for each rank of a process, which carries out its send queues: those of one queue
// in order, different ones in any, each as late as it likes. Queues that say what a card needs
// (CardQueue) have a bell, and only when it has rung the card looks at their doorbell.
class QueueCards {
  public:
    using Queues = ep::SendQueues;
    static constexpr uint32_t kData = 11, kFlags = 12, kSource = 13, kScratch = 14;  // keys
    static constexpr uint64_t kLongestDelay = 2000;  // of a queue, in steps

    // regions: by rank.
    QueueCards(const std::vector<Queues>& ranks, const std::vector<char*>& regions, size_t bytes,
               uint64_t seed);
    // Some time passes, and an entry may be carried out.
    void step();

    uint64_t left = UINT64_MAX;  // entries that they will still carry out

  private:
    struct State {
        uint64_t done = 0, held_until = 0;
        uint64_t bell = 0;   // as it was heard last
        uint16_t heard = 0;  // entries, modulo 2^16
    };
    uint16_t listen(size_t rank, size_t number, const ep::SendQueue& queue, State& state);
    void carry_out(size_t rank, size_t number, const ep::SendQueue& queue, State& state);

    std::vector<Queues> ranks_;
    std::vector<char*> regions_;
    size_t bytes_;
    std::mt19937_64 random_;
    uint64_t now_ = 0;
    std::vector<std::vector<State>> states_;
};

}  // namespace simt
