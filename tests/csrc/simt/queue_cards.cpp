#include "simt.h"
// after it
#include <bit>

#include "order.h"
#include "queue_cards.h"

namespace simt {

QueueCards::QueueCards(const std::vector<Queues>& ranks, const std::vector<char*>& regions,
                       size_t bytes, uint64_t seed)
    : ranks_(ranks), regions_(regions), bytes_(bytes), random_(seed) {
    for (const Queues& queues : ranks_) {
        states_.emplace_back(queues.count());
        for (size_t i = 0; i < queues.count(); ++i) {
            queues[i].clear();
            if (!queues.cards) continue;
            for (uint32_t place = 0; place <= queues.cards[i].last_completion; ++place)
                queues.cards[i].completions[place].report(0, ep::Completion::kNothingYet);
        }
    }
}

void QueueCards::step() {
    ++now_;
    if (left == 0) return;
    const size_t rank = random_() % ranks_.size();
    const size_t number = random_() % states_[rank].size();
    const ep::SendQueue queue = ranks_[rank][number];
    State& state = states_[rank][number];
    if (now_ < state.held_until) return;
    if (listen(rank, number, queue, state) == static_cast<uint16_t>(state.done)) return;
    if (random_() % 16 == 0) {
        state.held_until = now_ + random_() % kLongestDelay;
    } else {
        carry_out(rank, number, queue, state);
        --left;
    }
}

// Entries below which number may be carried out.
uint16_t QueueCards::listen(size_t rank, size_t number, const ep::SendQueue& queue, State& state) {
    if (!queue.card) return queue.rung();
    const uint64_t bell = *queue.card->bell;
    if (bell == state.bell) return state.heard;
    state.bell = bell;
    const order::Name card = {rank, number};
    order::card_acquire(card, queue.card->bell);
    const auto begin = std::bit_cast<ep::SendEntry::Begin>(bell);
    const auto end = static_cast<uint16_t>((begin.index_and_opcode >> 8) + 1);
    if (begin.queue_and_size >> 8 != queue.card->number) die("a bell of another queue");
    const uint16_t doorbell = ep::SendQueue::end_of(*queue.card->doorbell);
    if (static_cast<int16_t>(doorbell - end) < 0) die("a bell before its doorbell");
    if (random_() % 2) {  // what was told since the bell rang may be taken, too
        order::card_acquire(card, queue.card->doorbell);
        return state.heard = doorbell;
    }
    if (static_cast<int16_t>(end - state.heard) > 0) state.heard = end;
    return state.heard;
}

void QueueCards::carry_out(size_t rank, size_t number, const ep::SendQueue& queue, State& state) {
    const order::Name card = {rank, number};
    const ep::CardQueue* own = queue.card;
    if (!own) order::card_acquire(card, queue.doorbell);
    const ep::SendEntry& entry = queue.place_of(state.done);
    order::card_read(card, &entry, sizeof entry);
    const size_t peer = number / 2 % ranks_[rank].ranks;
    const uint64_t address = entry.remote.address;
    if (entry.index() != static_cast<uint16_t>(state.done)) die("an entry has another number");
    const bool is_write = entry.opcode() == ep::SendEntry::kWrite;
    if (uint32_t{entry.control.queue_and_size} >> 8 != (own ? own->number : number))
        die("an entry of another queue");
    if (uint32_t{entry.remote.key} != (!own ? queue.key : is_write ? kData : kFlags))
        die("an entry with another key");
    const ep::SendEntry::Local& local = is_write ? entry.write.source : entry.add.old_value;
    if (uint32_t{local.key} != (!own ? queue.key : is_write ? kSource : kScratch))
        die("an entry with another key of this side");
    if (own && !is_write && uint64_t{local.address} != own->scratch.address)
        die("an entry that leaves its value elsewhere");
    if (is_write) {
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
    ep::Completion& completion =
        own ? own->completions[state.done & own->last_completion] : *queue.completion;
    completion.report(static_cast<uint16_t>(state.done), ep::Completion::kDone,
                      own ? state.done >> own->completion_bits : 0);
    order::card_signal(card, completion.last_word(), 0);
    ++state.done;
}

}  // namespace simt
