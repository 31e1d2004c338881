#include "simt.h"
// after it
#include "order.h"
#include "queue_cards.h"

namespace simt {

QueueCards::QueueCards(const std::vector<ep::SendQueues>& ranks, const std::vector<char*>& regions,
                       size_t bytes, uint64_t seed)
    : ranks_(ranks), regions_(regions), bytes_(bytes), random_(seed) {
    for (const ep::SendQueues& queues : ranks_) {
        states_.emplace_back(queues.count());
        for (size_t i = 0; i < queues.count(); ++i) queues[i].clear();
    }
}

void QueueCards::step() {
    ++now_;
    if (left == 0) return;
    const size_t rank = random_() % ranks_.size();
    const size_t number = random_() % states_[rank].size();
    const ep::SendQueue queue = ranks_[rank][number];
    State& state = states_[rank][number];
    if (now_ < state.held_until || queue.rung() == static_cast<uint16_t>(state.done)) return;
    if (random_() % 16 == 0) {
        state.held_until = now_ + random_() % kLongestDelay;
    } else {
        carry_out(rank, number, queue, state);
        --left;
    }
}

void QueueCards::carry_out(size_t rank, size_t number, const ep::SendQueue& queue, State& state) {
    const order::Name card = {rank, number};
    order::card_acquire(card, queue.doorbell);
    const ep::SendEntry& entry = queue.entries[state.done & (queue.depth - 1)];
    order::card_read(card, &entry, sizeof entry);
    const size_t peer = number / 2 % ranks_[rank].ranks;
    const uint64_t address = entry.remote.address;
    if (entry.index() != static_cast<uint16_t>(state.done)) die("an entry has another number");
    if (uint32_t{entry.control.queue_and_size} >> 8 != number) die("an entry of another queue");
    if (uint32_t{entry.remote.key} != queue.key) die("an entry with another key");
    if (entry.opcode() == ep::SendEntry::kWrite) {
        const uint64_t source = entry.write.source.address;
        const uint32_t bytes = entry.write.source.bytes;
        if (address + bytes > bytes_ || source + bytes > bytes_) die("a write out of bounds");
        order::card_read(card, regions_[rank] + source, bytes);
        order::card_write(card, regions_[peer] + address, regions_[rank] + source, bytes);
    } else {
        if (entry.opcode() != ep::SendEntry::kFetchAdd) die("an unknown entry");
        if (address + sizeof(uint64_t) > bytes_ || address % sizeof(uint64_t))
            die("an addition out of bounds");
        auto* word = reinterpret_cast<uint64_t*>(regions_[peer] + address);
        *word += entry.add.atomic.increment;
        order::card_signal(card, word, *word);
    }
    queue.completion->tell(static_cast<uint16_t>(state.done++), ep::Completion::kDone);
    order::card_signal(card, queue.completion->last_word(), 0);
}

}  // namespace simt
