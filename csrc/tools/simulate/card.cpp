#include "tools/simulate/card.h"

#include <algorithm>

namespace ep {

VirtualCards::VirtualCards(VirtualCluster& cluster) : cluster_(cluster) {
    for (size_t rank = 0; rank < cluster.gpus.size(); ++rank) {
        Card& card = cards_.emplace_back();
        card.cards = this;
        card.rank = static_cast<int>(rank);
    }
}

void VirtualCards::post(VirtualFiber& fiber, const Message& message) {
    fiber.time += cluster_.machine.card_post;
    take(fiber, message);
}

void VirtualCards::post(VirtualFiber& fiber, const std::vector<Message>& messages) {
    if (!messages.empty()) fiber.time += cluster_.machine.card_post;
    for (const Message& message : messages) {
        take(fiber, message);
        fiber.time += cluster_.machine.card_message;
    }
}

void VirtualCards::take(VirtualFiber& fiber, const Message& message) {
    cluster_.clock.catch_up(fiber);
    Card& card = cards_[fiber.rank];
    const bool takes_turns = cluster_.machine.card_turn > 0;
    std::deque<Message>& queue_pair = card.queue_pairs[takes_turns ? message.queue_pair : 0];
    queue_pair.push_back(message);
    if (queue_pair.size() == 1) card.turns.push_back(takes_turns ? message.queue_pair : 0);
    if (card.is_busy) return;
    card.is_busy = true;
    cluster_.clock.at(fiber.time + cluster_.machine.card_doorbell, serve, &card);
}

void VirtualCards::serve(void* card, uint64_t, double time) {
    auto& one = *static_cast<Card*>(card);
    one.cards->serve(one, time);
}

// Gives the next queue pair its turn.
void VirtualCards::serve(Card& card, double time) {
    if (card.turns.empty()) {
        card.is_busy = false;
        return;
    }
    const Machine& machine = cluster_.machine;
    const int number = card.turns.front();
    card.turns.pop_front();
    std::deque<Message>& queue_pair = card.queue_pairs[number];
    Message& message = queue_pair.front();
    const double part =
        machine.card_turn > 0 ? std::min(message.bytes, machine.card_turn) : message.bytes;
    message.bytes -= part;
    const bool is_last = message.bytes <= 0;
    const double sends = part / machine.card;
    const double lasts = sends + (is_last ? machine.card_message : 0);
    const double sent = cluster_.gpus[card.rank].card_out.use(time, lasts);
    const double there =
        cluster_.gpus[message.to].card_in.use(sent + machine.card_way - sends, sends);
    bytes_sent_ += part;
    if (is_last) {
        ++messages_;
        flags_ += message.flag != nullptr;
        if (message.flag)
            cluster_.clock.add_at(there + machine.card_signal, message.flag, message.add);
        queue_pair.pop_front();
    }
    if (!queue_pair.empty()) card.turns.push_back(number);
    cluster_.clock.at(sent, serve, &card);
}

}  // namespace ep
