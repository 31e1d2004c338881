// Send queues: warps post in them, and a network card or a thread carries the entries out.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "core/incident.h"
#include "exec/warp.h"
#include "fabric/queue/entry.h"

namespace ep {

class SoftwareNic;
void wake(SoftwareNic& nic);

// Counters of the warps that post in a queue, in the memory of these warps.
struct alignas(32) QueueProducer {
    uint64_t begun;      // entries that have been given a number
    uint64_t posted;     // entries that are written, and all before them
    uint64_t completed;  // entries that are known to have been carried out
};

// An mlx5 queue pair that a network card reads directly, as the card's driver maps it. Its rings
// may hold more than `depth` entries. Queues to one rank may share a queue pair and its producer.
struct CardQueue {
    SendEntry* entries;
    uint64_t* doorbell;       // DoorbellRecord
    uint64_t* bell;           // the card's register; null: a thread carries out the queue
    Completion* completions;  // a ring of them
    uint32_t last_entry;      // masks for numbers of entries and of completions
    uint32_t last_completion;
    uint32_t completion_bits;  // number of bits in it
    uint32_t number;           // the queue pair's number, 24 bits
    uint32_t data, flags;      // keys of the region at the other end: see verbs::Region
    uint32_t source;           // key of the region at this end
    SendEntry::Place scratch;  // where additions leave the old value
    QueueProducer* producer;

    // Whether an entry was carried out, or given up because of an error.
    template <class W>
    EP_FN bool is_over(uint64_t entry) const {
        uint64_t* word = completions[entry & last_completion].last_word();
        return Completion::is_there(W::template acquire<Scope::System>(word),
                                    entry >> completion_bits);
    }
};

// A ring of entries for one rank. Warps post in turn. A thread or card reads the doorbell, carries
// out the entries below it in order, and reports progress in the completion. It holds no pointer
// into another process, and at most `depth` entries that are not carried out.
struct SendQueue {
    using Producer = QueueProducer;

    SendEntry* entries;
    uint32_t depth;      // a power of two, at most 2^15: numbers in entries have 16 bits
    uint32_t number;     // 24 bits, as in entries
    uint32_t key;        // of the region, the same at both ends
    uint64_t scratch;    // eight bytes of the region, for the old value of an addition
    uint64_t* doorbell;  // DoorbellRecord
    Completion* completion;
    Producer* producer;
    SoftwareNic* sleeper;  // woken whenever a queue rings; null: none
    // The card's queue, which replaces most of the above; null: a thread carries out the entries.
    const CardQueue* card;

    // Writes bytes [src, src + bytes) of this rank's region to [dst, dst + bytes) of that of
    // `peer`. It is not carried out before a later entry rings. Returns false, with nothing posted,
    // if a wait failed.
    template <class W>
    EP_FN bool post_write(W& warp, int peer, uint64_t dst, uint64_t src, uint32_t bytes) const {
        return post(warp, peer, false,
                    [&](uint16_t index) { return write_of(index, dst, src, bytes); });
    }

    // Adds to the word at `flag` of `peer`, and rings: all posted entries may be carried out, and
    // what this warp wrote or acquired before may be read.
    template <class W>
    EP_FN bool post_add(W& warp, int peer, uint64_t flag, uint64_t increment) const {
        return post(warp, peer, true,
                    [&](uint16_t index) { return add_of(index, flag, increment); });
    }

    EP_FN SendEntry write_of(uint16_t index, uint64_t dst, uint64_t src, uint32_t bytes) const {
        if (card)
            return SendEntry::write_of(index, card->number, {card->data, dst}, {card->source, src},
                                       bytes);
        return SendEntry::write_of(index, number, {key, dst}, {key, src}, bytes);
    }
    EP_FN SendEntry add_of(uint16_t index, uint64_t flag, uint64_t increment) const {
        if (card)
            return SendEntry::add_of(index, card->number, {card->flags, flag}, increment,
                                     card->scratch);
        return SendEntry::add_of(index, number, {key, flag}, increment, {key, scratch});
    }
    EP_FN SendEntry& place_of(uint64_t own) const {
        return card ? card->entries[own & card->last_entry] : entries[own & (depth - 1)];
    }

    // ---- doorbells: what carries entries out checks the bell, then the doorbell record

    EP_FN uint64_t* doorbell_word() const { return card ? card->doorbell : doorbell; }
    EP_FN uint64_t bell_of(uint64_t end, bool ends_in_addition) const {
        return ends_in_addition
                   ? SendEntry::begin_of_add(static_cast<uint16_t>(end - 1), card->number)
                   : place_of(end - 1).begin();
    }
    // Called before and after a bell: a card's register may be memory that is not ordered with any
    // other, and whose stores a host's processor combines before they leave.
    static EP_FN void fence_bell() {
#if !defined(__CUDACC__) && defined(__x86_64__)
        asm volatile("sfence" ::: "memory");
#elif !defined(__CUDACC__) && defined(__aarch64__)
        asm volatile("dsb st" ::: "memory");
#endif
    }

    // ---- the side that carries entries out

    uint16_t rung() const {
        return end_of(std::atomic_ref<uint64_t>(*doorbell).load(std::memory_order_acquire));
    }
    static uint16_t end_of(uint64_t doorbell) {
        return static_cast<uint16_t>(std::bit_cast<DoorbellRecord>(doorbell).send);
    }

    // Clears all but the producer's counters.
    void clear() const {
        std::atomic_ref<uint64_t>(*doorbell).store(0, std::memory_order_relaxed);
        completion->report(0, Completion::kNothingYet);
    }

    // Whether entry `own` has room, as far as completions are known. Called by one lane.
    EP_FN bool has_room_for(uint64_t own) const { return own < producer->completed + depth; }

    // The doorbell's value once entries below `end` may be taken.
    static EP_FN uint64_t rung_for(uint64_t end) {
        return std::bit_cast<uint64_t>(
            DoorbellRecord{uint32_t{0}, uint32_t{static_cast<uint16_t>(end)}});
    }
    EP_FN void wake_sleeper() const {
#if !defined(__CUDACC__)
        if (sleeper) wake(*sleeper);
#endif
    }

    // How many of `posted` entries are over. A card reports each one separately, so two are
    // checked: the one whose place the next entry takes, and the one half a ring later.
    template <class W>
    EP_FN uint64_t completed_of(uint64_t posted) const {
        if (card) {
            const uint64_t first = posted - depth, middle = first + depth / 2;
            if (card->template is_over<W>(middle)) return middle + 1;
            return first + card->template is_over<W>(first);
        }
        return completed_by(W::template acquire<Scope::System>(completion->last_word()), posted);
    }

  private:
    template <class W, class Make>
    EP_FN bool post(W& warp, int peer, bool rings, Make&& make) const {
        const uint64_t own = warp.template arrive<Scope::Rank>(&producer->begun);
        const bool is_next = warp.wait_all(Wait::SendQueue, 1, [&](int) {
            return WaitCondition{W::template acquire<Scope::Rank>(&producer->posted), own, peer};
        });
        if (!is_next || !make_room(warp, own, peer)) return false;
        warp.lanes(1, [&](int) { place_of(own) = make(static_cast<uint16_t>(own)); });
        if (rings) ring(warp, own + 1, true);
        warp.template publish<Scope::Rank>(&producer->posted, own + 1);
        return true;
    }

    // Makes room for entry `own`, once all before it are posted.
    template <class W>
    EP_FN bool make_room(W& warp, uint64_t own, int peer) const {
        if (has_room_for(own)) return true;
        ring(warp, own, false);  // what waits for its signal must leave, or there is never room
        uint64_t completed = 0;
        const bool has_room = warp.wait_all(Wait::SendQueue, 1, [&](int) {
            completed = completed_of<W>(own);
            return WaitCondition{completed + depth, own + 1, peer};
        });
        if (has_room) warp.lanes(1, [&](int) { producer->completed = completed; });
        return has_room;
    }

    static EP_FN uint64_t completed_by(uint64_t word, uint64_t posted) {
        if (Completion::kind_of(word) == Completion::kNothingYet) return 0;
        return posted - static_cast<uint16_t>(static_cast<uint16_t>(posted) - 1 -
                                              Completion::entry_of(word));
    }

    // Lets entries below `end`, of which there is at least one, be taken.
    template <class W>
    EP_FN void ring(W& warp, uint64_t end, bool ends_in_addition) const {
        warp.template publish<Scope::System>(doorbell_word(), rung_for(end));
        if (!card) return wake_sleeper();
        fence_bell();
        warp.template publish<Scope::System>(card->bell, bell_of(end, ends_in_addition));
        fence_bell();
    }
};

// Posts one entry per lane in the mask, each to its own queue: entry_of(lane, queue, index) to
// queue_of(lane), which leads to peer_of(lane). rings: whether what was posted may be taken now. A
// lane posts when its turn has come and does not wait for those of other lanes: two warps could
// wait for each other. Returns false if a wait failed.
template <class W, class QueueOf, class PeerOf, class EntryOf>
EP_FN bool post_each(W& warp, uint32_t lanes, bool rings, QueueOf&& queue_of, PeerOf&& peer_of,
                     EntryOf&& entry_of) {
    PerLane<W, uint64_t> own, completed;
    auto is_in = [](uint32_t mask, int lane) { return mask >> lane & 1; };
    auto ring = [&](uint32_t mask, int entries) {
        warp.template publish_lanes<Scope::System>(32, [&](int lane, auto&& store) {
            if (!is_in(mask, lane)) return;
            const auto queue = queue_of(lane);
            store(queue.doorbell_word(), queue.rung_for(own[lane] + entries));
            queue.wake_sleeper();
        });
        auto has_bell = [&](int lane) { return is_in(mask, lane) && queue_of(lane).card; };
        if (!warp.ballot(32, has_bell)) return;
        warp.template publish_lanes<Scope::System>(32, [&](int lane, auto&& store) {
            if (!has_bell(lane)) return;
            const auto queue = queue_of(lane);
            queue.fence_bell();
            store(queue.card->bell, queue.bell_of(own[lane] + entries, entries != 0));
            queue.fence_bell();
        });
    };
    warp.lanes(32, [&](int lane) {
        if (is_in(lanes, lane)) own[lane] = W::take_number(&queue_of(lane).producer->begun);
    });
    for (uint32_t left = lanes, ready; left; left &= ~ready) {
        ready = warp.wait_any(Wait::SendQueue, 32, [&](int lane) {
            if (!is_in(left, lane)) return never();
            uint64_t* posted = &queue_of(lane).producer->posted;
            return WaitCondition{W::template acquire<Scope::Rank>(posted), own[lane],
                                 peer_of(lane)};
        });
        if (!ready) return false;
        const uint32_t full = warp.ballot(32, [&](int lane) {
            return is_in(ready, lane) && !queue_of(lane).has_room_for(own[lane]);
        });
        if (full) {
            ring(full, 0);  // what waits for its signal must leave, or there is never room
            const bool has_room = warp.wait_all(Wait::SendQueue, 32, [&](int lane) {
                if (!is_in(full, lane)) return nothing_to_wait_for();
                const auto queue = queue_of(lane);
                completed[lane] = queue.template completed_of<W>(own[lane]);
                return WaitCondition{completed[lane] + queue.depth, own[lane] + 1, peer_of(lane)};
            });
            if (!has_room) return false;
            warp.lanes(32, [&](int lane) {
                if (is_in(full, lane)) queue_of(lane).producer->completed = completed[lane];
            });
        }
        warp.lanes(32, [&](int lane) {
            if (!is_in(ready, lane)) return;
            const auto queue = queue_of(lane);
            queue.place_of(own[lane]) = entry_of(lane, queue, static_cast<uint16_t>(own[lane]));
        });
        if (rings) ring(ready, 1);
        warp.template publish_lanes<Scope::Rank>(32, [&](int lane, auto&& store) {
            if (is_in(ready, lane)) store(&queue_of(lane).producer->posted, own[lane] + 1);
        });
    }
    return true;
}

// The queues of a symmetric heap: each channel, and one more for what belongs to none (see
// core/network_flags.h), has two queues to each rank, one for puts and their signals, one for
// credits. Both sides share one block of memory: all entries, then completions, then doorbells.
struct SendQueues {
    SendEntry* entries;
    Completion* completions;
    uint64_t* doorbells;
    QueueProducer* producers;
    int ranks, channels;
    uint32_t depth, key;
    SoftwareNic* sleeper;
    const CardQueue* cards;  // by queue; null: a thread carries all of them out

    size_t count() const { return count(ranks, channels); }
    static size_t count(int ranks, int channels) {
        return 2 * static_cast<size_t>(ranks) * (channels + 1);
    }
    // Bytes of the memory that both sides share, which begins on a cache line.
    static size_t bytes(size_t count, uint32_t depth) {
        return count * (depth * sizeof(SendEntry) + sizeof(Completion) + sizeof(uint64_t));
    }
    static SendQueues over(char* memory, QueueProducer* producers, int ranks, int channels,
                           uint32_t depth, uint32_t key, SoftwareNic* sleeper) {
        const size_t all = count(ranks, channels);
        auto* entries = reinterpret_cast<SendEntry*>(memory);
        auto* completions = reinterpret_cast<Completion*>(entries + all * depth);
        auto* doorbells = reinterpret_cast<uint64_t*>(completions + all);
        return {entries,  completions, doorbells, producers, ranks,
                channels, depth,       key,       sleeper,   nullptr};
    }

    EP_HD SendQueue puts(int channel, int rank) const { return (*this)[number(channel, rank)]; }
    EP_HD SendQueue credits(int channel, int rank) const {
        return (*this)[number(channel, rank) + 1];
    }
    EP_HD SendQueue operator[](size_t number) const {
        const CardQueue* card = cards && cards[number].bell ? cards + number : nullptr;
        return {entries + number * depth,
                depth,
                static_cast<uint32_t>(number),
                key,
                0,
                doorbells + number,
                completions + number,
                card ? card->producer : producers + number,
                sleeper,
                card};
    }

  private:
    EP_HD size_t number(int channel, int rank) const {
        return 2 * (static_cast<size_t>(channel) * ranks + rank);
    }
};

}  // namespace ep
