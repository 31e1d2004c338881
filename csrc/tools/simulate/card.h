#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "tools/simulate/cluster.h"

namespace ep {

// The network cards of a cluster, one per GPU. Messages of one queue pair leave and arrive in
// order; queue pairs take turns, or the card serves what comes first.
class VirtualCards {
  public:
    // How a card differs from the others.
    struct Faults {
        int slow_rank = -1;
        double slow_speed = 1;  // factor of its bandwidth
        int lossy_rank = -1;
        uint64_t lost_signal = 0;  // that rank's signal that never arrives, from 1; 0: none
    };

    VirtualCards(VirtualCluster& cluster, const Faults& faults);

    struct Message {
        int to;
        int queue_pair;
        double bytes;
        uint64_t* flag;  // added to when the message arrives, or null
        uint64_t add;
    };
    // Posts at the fiber's time. Several messages are those of its lanes, which post side by side:
    // each takes the warp as long as the card, which is a guess.
    void post(VirtualFiber& fiber, const Message& message);
    void post(VirtualFiber& fiber, const std::vector<Message>& messages);

    static constexpr double kFlagBytes = 64;

    // Flags included.
    double bytes_sent() const { return bytes_sent_; }
    uint64_t flags() const { return flags_; }
    uint64_t messages() const { return messages_; }

  private:
    struct Card {
        VirtualCards* cards;
        int rank;
        bool is_busy = false;
        std::map<int, std::deque<Message>> queue_pairs;
        std::deque<int> turns;
        uint64_t signals = 0;
    };
    void take(VirtualFiber& fiber, const Message& message);
    void serve(Card& card, double time);
    double speed(int rank) const;

    VirtualCluster& cluster_;
    Faults faults_;
    std::vector<Card> cards_;
    double bytes_sent_ = 0;
    uint64_t messages_ = 0, flags_ = 0;
};

}  // namespace ep
