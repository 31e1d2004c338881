#include "tools/network/load.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/row.h"

namespace ep {
namespace {

using Clock = std::chrono::steady_clock;

// SplitMix64 (Steele, Lea, Flood 2014).
uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// Bytes that differ from those of every other put, and each of their words from its neighbours.
class Pattern {
  public:
    Pattern(uint64_t seed, int from, int to, int channel, uint64_t number) : key_(mixed(seed)) {
        for (const uint64_t part : {uint64_t(from), uint64_t(to), uint64_t(channel), number})
            key_ = mixed(key_ ^ part);
    }

    size_t size(size_t most) const { return 1 + mixed(key_) % most; }
    void write(char* to, size_t bytes) const {
        for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
            const uint64_t word = word_at(at);
            std::memcpy(to + at, &word, std::min(sizeof word, bytes - at));
        }
    }
    bool is_at(const char* from, size_t bytes) const {
        for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
            const uint64_t word = word_at(at);
            if (std::memcmp(from + at, &word, std::min(sizeof word, bytes - at))) return false;
        }
        return true;
    }

  private:
    uint64_t word_at(size_t at) const { return key_ + at * 0x9e3779b97f4a7c15; }
    uint64_t key_;
};

// What posts in a queue: one thread, in the place of a channel's warps. Its rings are much shorter
// than a queue, so it waits for room for a moment at most.
class Poster {
  public:
    template <Scope>
    uint64_t arrive(uint64_t* counter) const {
        return (*counter)++;
    }
    template <class F>
    bool wait_all(Wait, int, F&& condition) const {
        const auto deadline = Clock::now() + std::chrono::seconds(10);
        for (;;) {
            const WaitCondition now = condition(0);
            if (now.observed >= now.required) return true;
            if (Clock::now() > deadline) return false;
            std::this_thread::yield();
        }
    }
    template <class F>
    void lanes(int count, F&& f) const {
        for (int lane = 0; lane < count; ++lane) f(lane);
    }
    template <Scope>
    void publish(uint64_t* word, uint64_t value) const {
        std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
    }
    template <Scope>
    static uint64_t acquire(const uint64_t* word) {
        return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(*word))
            .load(std::memory_order_acquire);
    }
};

void require_room(bool was_posted, int peer) {
    if (!was_posted)
        throw std::runtime_error("nothing is taken from the send queue to rank " +
                                 std::to_string(peer));
}

}  // namespace

size_t NetworkLoad::Sizes::heap_bytes() const {
    const size_t rings = static_cast<size_t>(world) * channels;
    return rings * (2 * kSlots * align_up(max_bytes, 64) + 2 * sizeof(uint64_t));
}

NetworkLoad::NetworkLoad(SoftwareNic& nic, const ControlBlock& control, char* heap, int rank,
                         Sizes sizes)
    : nic_(nic), control_(control), heap_(heap), rank_(rank), sizes_(sizes) {
    for (int channel = 0; channel < sizes_.channels; ++channel) {
        for (int peer = 0; peer < sizes_.world; ++peer) rings_.push_back({channel, peer});
    }
    std::vector<char*> heaps(sizes_.world);
    heaps[rank_] = heap_;
    port_ = nic_.open(std::move(heaps), sizes_.heap_bytes(), sizes_.channels);
}

size_t NetworkLoad::ring_index(int channel, int peer) const {
    return static_cast<size_t>(channel) * sizes_.world + peer;
}

// Offset in the ring to a rank, where puts wait to be sent, or in the ring where its puts arrive.
size_t NetworkLoad::slot(bool to_send, int channel, int peer, uint64_t number) const {
    const size_t index = (ring_index(channel, peer) * 2 + to_send) * kSlots + number % kSlots;
    return index * align_up(sizes_.max_bytes, 64);
}

size_t NetworkLoad::signal(int channel, int peer) const {
    return sizes_.heap_bytes() - (ring_index(channel, peer) * 2 + 1) * sizeof(uint64_t);
}

size_t NetworkLoad::credit(int channel, int peer) const {
    return signal(channel, peer) - sizeof(uint64_t);
}

uint64_t NetworkLoad::word_at(size_t offset) const {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(heap_ + offset))
        .load(std::memory_order_acquire);
}

// The memory of all ranks has the same layout: this rank puts into its own rings there.
void NetworkLoad::post_put(const Ring& ring, size_t bytes) {
    const auto queue = port_->queues().puts(ring.channel, ring.peer);
    const size_t source = slot(true, ring.channel, ring.peer, ring.sent);
    const size_t place = slot(false, ring.channel, rank_, ring.sent);
    Poster poster;
    require_room(queue.post_write(poster, ring.peer, place, source, static_cast<uint32_t>(bytes)) &&
                     queue.post_add(poster, ring.peer, signal(ring.channel, rank_), 1),
                 ring.peer);
}

bool NetworkLoad::send(Ring& ring, uint64_t goal, size_t bytes, std::optional<uint64_t> seed) {
    bool moved = false;
    while (ring.sent < goal && ring.sent < word_at(credit(ring.channel, ring.peer)) + kSlots) {
        size_t size = bytes;
        if (seed) {
            const Pattern pattern(*seed, rank_, ring.peer, ring.channel, ring.sent);
            size = pattern.size(bytes);
            pattern.write(heap_ + slot(true, ring.channel, ring.peer, ring.sent), size);
        }
        post_put(ring, size);
        ++ring.sent;
        moved = true;
    }
    return moved;
}

bool NetworkLoad::receive(Ring& ring, uint64_t goal, size_t bytes, std::optional<uint64_t> seed) {
    const uint64_t signalled = word_at(signal(ring.channel, ring.peer));
    const auto wrong = [&](const std::string& what) {
        return std::runtime_error("put " + std::to_string(ring.received) + " of rank " +
                                  std::to_string(ring.peer) + " in channel " +
                                  std::to_string(ring.channel) + " " + what);
    };
    if (signalled > ring.received + kSlots)
        throw wrong("was signalled before there was room for it");
    const uint64_t came = std::min(signalled, goal);  // the peer may be in its next call
    if (came == ring.received) return false;
    const auto queue = port_->queues().credits(ring.channel, ring.peer);
    const uint64_t taken = came - ring.received;
    for (; ring.received < came; ++ring.received) {
        if (!seed) continue;
        const Pattern expected(*seed, ring.peer, rank_, ring.channel, ring.received);
        if (!expected.is_at(heap_ + slot(false, ring.channel, ring.peer, ring.received),
                            expected.size(bytes)))
            throw wrong("is not what was sent: bytes were lost, or came after their signal");
    }
    Poster poster;
    require_room(queue.post_add(poster, ring.peer, credit(ring.channel, rank_), taken), ring.peer);
    return true;
}

void NetworkLoad::require_no_abort() const {
    const uint64_t word = std::atomic_ref<uint64_t>(const_cast<uint64_t&>(control_.abort))
                              .load(std::memory_order_acquire);
    if (word)
        throw std::runtime_error("the connection to rank " +
                                 std::to_string(ControlBlock::rank_of(word)) + " broke");
}

void NetworkLoad::wait(const std::function<bool()>& moved, const std::function<bool()>& is_done,
                       const std::function<std::string()>& missing, Seconds timeout,
                       Clock::time_point since) const {
    constexpr int kYields = 64;
    const auto deadline = since + timeout;
    for (int idle = 0; !is_done();) {
        if (moved()) {
            idle = 0;
            continue;
        }
        require_no_abort();
        if (Clock::now() > deadline)
            throw std::runtime_error(missing() + " within " + std::to_string(timeout.count()) +
                                     " s");
        if (++idle <= kYields)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

std::vector<NetworkLoad::Seconds> NetworkLoad::ping(int peer, bool begins, size_t bytes, int rounds,
                                                    Seconds timeout) {
    Ring& there = ring(0, peer);
    std::vector<Seconds> halves;
    const auto began = Clock::now();
    const auto receive_one = [&] {
        const uint64_t goal = there.received + 1;
        wait([&] { return receive(there, goal, bytes, {}); },
             [&] { return there.received == goal; },
             [&] { return "nothing came from rank " + std::to_string(peer); }, timeout, began);
    };
    for (int i = 0; i < rounds; ++i) {
        const auto start = Clock::now();
        if (begins) send(there, there.sent + 1, bytes, {});
        receive_one();
        if (!begins) send(there, there.sent + 1, bytes, {});
        halves.push_back(Seconds(Clock::now() - start) / 2);
    }
    return halves;
}

NetworkLoad::Seconds NetworkLoad::exchange(const std::vector<int>& targets,
                                           const std::vector<int>& sources, int puts, size_t bytes,
                                           std::optional<uint64_t> seed, Seconds timeout) {
    struct Half {
        Ring* ring;
        uint64_t goal;
    };
    std::vector<Half> to, from;
    for (int channel = 0; channel < sizes_.channels; ++channel) {
        for (const int peer : targets)
            to.push_back({&ring(channel, peer), ring(channel, peer).sent + puts});
        for (const int peer : sources)
            from.push_back({&ring(channel, peer), ring(channel, peer).received + puts});
    }
    const auto is_taken = [&](const Half& half) {
        return word_at(credit(half.ring->channel, half.ring->peer)) == half.goal;
    };
    const auto has_come = [](const Half& half) { return half.ring->received == half.goal; };
    const auto start = Clock::now();
    wait(
        [&] {
            bool moved = false;
            for (const Half& half : to) moved |= send(*half.ring, half.goal, bytes, seed);
            for (const Half& half : from) moved |= receive(*half.ring, half.goal, bytes, seed);
            return moved;
        },
        [&] {
            return std::all_of(to.begin(), to.end(), is_taken) &&
                   std::all_of(from.begin(), from.end(), has_come);
        },
        [&] {
            std::string text;
            const auto tell = [&](const Half& half, const char* what) {
                text += (text.empty() ? "rank " : ", rank ") + std::to_string(half.ring->peer) +
                        what + std::to_string(half.ring->channel);
            };
            for (const Half& half : to) {
                if (!is_taken(half)) tell(half, " did not take what was put in channel ");
            }
            for (const Half& half : from) {
                if (!has_come(half)) tell(half, " did not put all in channel ");
            }
            return text;
        },
        timeout, start);
    return Clock::now() - start;
}

}  // namespace ep
