#pragma once

#include <atomic>
#include <cstdint>

#include "core/incident.h"
#include "fabric/queue/entry.h"

namespace ep {

// A ring of entries towards one rank, with one producer at a time. Who carries them out reads the
// doorbell, takes the entries below it in order, and says in the completion how far it got. Nothing
// here is a pointer into another process, and nothing is ever more than `depth` entries ahead.
struct SendQueue {
    static constexpr uint32_t kMostDepth = 1 << 15;  // differences of 16-bit numbers have a sign

    SendEntry* entries;
    uint32_t depth;      // a power of two
    uint32_t number;     // 24 bits, as entries say it
    uint32_t key;        // of the region at both ends
    uint64_t scratch;    // eight bytes of it, for what an addition returns
    uint32_t* doorbell;  // BigEndian: the number of the next empty entry, modulo 2^16
    Completion* completion;
    uint64_t* posted;  // entries so far: the producer's own

    // Entries that are carried out.
    uint64_t completed() const {
        const uint32_t word =
            std::atomic_ref<uint32_t>(*last_word()).load(std::memory_order_acquire);
        if (word >> 28 == Completion::kNothingYet) return 0;
        const uint16_t last = static_cast<uint16_t>((word & 0xff) << 8 | (word >> 8 & 0xff));
        return *posted - static_cast<uint16_t>(static_cast<uint16_t>(*posted) - 1 - last);
    }

    bool has_room() const { return completed() + depth > *posted; }

    // Until there is room for one more entry. False: the wait ended badly, and nothing may be
    // posted.
    template <class W>
    bool wait_for_room(W& warp, int peer) const {
        return warp.wait_all(Wait::SendQueue, 1, [&](int) {
            return WaitCondition{completed() + depth, *posted + 1, peer};
        });
    }

    // Entry number *posted. Nobody takes it before ring().
    void post(const SendEntry& entry) const { entries[(*posted)++ & (depth - 1)] = entry; }

    uint16_t next_index() const { return static_cast<uint16_t>(*posted); }

    // Everything that was posted may be taken, and so may what this thread wrote before.
    void ring() const {
        const BigEndian<uint32_t> number = uint32_t{next_index()};
        std::atomic_ref<uint32_t>(*doorbell).store(std::bit_cast<uint32_t>(number),
                                                   std::memory_order_seq_cst);
    }

    // ---- the other side

    uint16_t rung() const {
        const uint32_t raw = std::atomic_ref<uint32_t>(*doorbell).load(std::memory_order_acquire);
        return static_cast<uint16_t>(std::bit_cast<BigEndian<uint32_t>>(raw));
    }

    void complete(uint16_t index, uint8_t kind = Completion::kDone) const {
        const uint32_t word = uint32_t{kind} << 28 | (index & 0xff) << 8 | index >> 8;
        std::atomic_ref<uint32_t>(*last_word()).store(word, std::memory_order_release);
    }

    // As new.
    void clear() const {
        *posted = 0;
        *doorbell = 0;
        complete(0, Completion::kNothingYet);
    }

  private:
    // The entry's number, the signature and the kind, which a card writes at once.
    uint32_t* last_word() const {
        return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(completion) +
                                           offsetof(Completion, entry));
    }
};

}  // namespace ep
