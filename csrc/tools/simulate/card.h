#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "tools/simulate/cluster.h"

namespace ep {

// The network cards of a cluster, one per GPU. Messages of one queue pair leave and arrive in
// order; queue pairs take turns, or the card serves what comes first.
class VirtualCards {
  public:
    explicit VirtualCards(VirtualCluster& cluster);

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
    };
    void take(VirtualFiber& fiber, const Message& message);
    static void serve(void* card, uint64_t, double time);
    void serve(Card& card, double time);

    VirtualCluster& cluster_;
    std::vector<Card> cards_;
    double bytes_sent_ = 0;
    uint64_t messages_ = 0, flags_ = 0;
};

}  // namespace ep
