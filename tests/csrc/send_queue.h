#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fabric/queue/software_nic.h"

// Two ranks, each with a software network card, joined by a socket: what is put is there before its
// signal, whatever the sizes, also when the 16-bit numbers of entries wrap around.

namespace ep {

constexpr int kChannels = 2;
constexpr size_t kHeapBytes = 1 << 20, kFlags = 0, kCredits = 128, kData = 4096;

struct SpinningWarp {
    static constexpr bool kWakes = true;  // the network's thread, after it has rung

    template <Scope>
    static uint64_t acquire(uint64_t* word) {
        return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
    }
    template <Scope>
    void publish(uint64_t* word, uint64_t value) {
        std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
    }
    template <Scope>
    uint64_t arrive(uint64_t* word) {
        return std::atomic_ref<uint64_t>(*word).fetch_add(1, std::memory_order_acq_rel);
    }
    template <class F>
    void lanes(int count, F&& f) {
        for (int lane = 0; lane < count; ++lane) f(lane);
    }
    template <class F>
    bool wait_all(Wait, int, F&& need) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (true) {
            const WaitCondition mine = need(0);
            if (mine.observed >= mine.required) return true;
            if (std::chrono::steady_clock::now() > deadline) return false;
            std::this_thread::yield();
        }
    }
};

struct TestRank {
    alignas(128) std::array<char, kHeapBytes> heap{};
    std::array<ControlBlock, 2> controls{};
    std::unique_ptr<SoftwareNic> nic;
    std::shared_ptr<SoftwareNic::Port> port;
    bool is_direct;

    explicit TestRank(int rank, const std::shared_ptr<verbs::Card>& card = nullptr,
                      const SoftwareNic::Cards& more = {})
        : is_direct(card && card->is_direct()) {
        SoftwareNic::Cards cards = more;
        if (card) cards.insert(cards.begin(), card);
        nic = std::make_unique<SoftwareNic>(
            rank, std::vector<ControlBlock*>{&controls[0], &controls[1]}, std::move(cards));
        std::vector<char*> heaps(2, nullptr);
        heaps[rank] = heap.data();
        port = nic->open(heaps, kHeapBytes, kChannels);
    }
    uint64_t flag(size_t offset) {
        return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(heap.data() + offset))
            .load(std::memory_order_acquire);
    }
    // Why the connection to the other rank broke, once the card has stopped; "" if it did not.
    std::string lost(int rank) const {
        const Reason& reason = controls[rank].reason;
        return {reason.text, reason.bytes};
    }
};

inline void require(bool ok, const std::string& what) {
    if (!ok) throw std::runtime_error(what);
}

// Until the rank's waits have ended, because of rank 1.
inline void wait_until_lost(SpinningWarp& warp, TestRank& rank, const char* otherwise) {
    const auto aborted = [&](int) {
        const uint64_t word =
            std::atomic_ref<uint64_t>(rank.controls[0].abort).load(std::memory_order_acquire);
        return WaitCondition{word, 1, 1};
    };
    require(warp.wait_all(Wait::None, 1, aborted), otherwise);
    require(ControlBlock::outcome_of(rank.controls[0].abort) == Outcome::Lost &&
                ControlBlock::rank_of(rank.controls[0].abort) == 1,
            "somebody else is to blame");
}

// Until rank 1 has heard from rank 0 that their connection broke.
inline void wait_until_told(SpinningWarp& warp, TestRank& rank) {
    const auto word = [&] {
        return std::atomic_ref<uint64_t>(rank.controls[1].abort).load(std::memory_order_acquire);
    };
    require(warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{word(), 1, 0}; }),
            "the other rank is not told of a loss");
    require(word() == ControlBlock::abort_word(Outcome::Lost, 1), "it is told something else");
}

// What no rank sends ends the connection. pair: of a rank that has a card.
using QueuePairOf = std::shared_ptr<verbs::QueuePair>;
inline void require_refused(TestRank& rank, const Frame& frame, const QueuePairOf& pair = {}) {
    int sockets[2];
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
    rank.nic->start({-1, sockets[0]}, {nullptr, pair});
    require(write(sockets[1], &frame, sizeof frame) == sizeof frame, "no write");
    SpinningWarp warp;
    wait_until_lost(warp, rank, "garbage was taken");
    rank.nic->stop(std::chrono::seconds(0));
    require(rank.lost(1) == "it sent what no rank sends", rank.lost(1));
    close(sockets[1]);
}

// What lies between two ranks: with a seed it carries a few bytes at a time, whenever it likes, and
// holds few, so that everything arrives in parts. Without one it is a pair of sockets.
class Wire {
  public:
    explicit Wire(std::optional<uint64_t> seed) {
        if (!seed) {
            connect(ends_[0], ends_[1]);
            return;
        }
        random_.seed(*seed);
        for (int side : {0, 1}) {
            connect(ends_[side], inner_[side]);
            const int few = 4096 << random_() % 4;
            for (const int socket : {ends_[side], inner_[side]})
                setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &few, sizeof few);
        }
        thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
    }
    ~Wire() {
        if (!thread_.joinable()) return;
        thread_.request_stop();
        thread_.join();
        for (const int socket : inner_) close(socket);
    }
    Wire(const Wire&) = delete;
    // For a rank, which closes it.
    int end(int rank) const { return ends_[rank]; }

  private:
    static void connect(int& one, int& other) {
        int sockets[2];
        require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
        one = sockets[0];
        other = sockets[1];
    }

    void run(const std::stop_token& stop) {
        std::array<char, 70'000> bytes;
        while (!stop.stop_requested()) {
            bool moved = false;
            for (int side : {0, 1}) {
                if (random_() % 3 == 0) continue;
                const size_t most = random_() % 2 ? 1 + random_() % 40 : bytes.size();
                const ssize_t got = recv(inner_[side], bytes.data(), most, MSG_DONTWAIT);
                for (ssize_t sent = 0; sent < got && !stop.stop_requested();) {
                    const size_t part = std::min<size_t>(got - sent, 1 + random_() % 5000);
                    const ssize_t done = send(inner_[1 - side], bytes.data() + sent, part,
                                              MSG_DONTWAIT | MSG_NOSIGNAL);
                    if (done > 0) sent += done;
                    if (done < 0 && errno != EAGAIN) break;
                    if (done < 0) std::this_thread::yield();
                }
                moved |= got > 0;
            }
            if (!moved) std::this_thread::yield();
        }
    }

    int ends_[2], inner_[2];
    std::mt19937_64 random_;
    std::jthread thread_;
};

// Of two ranks; null: none.
struct Cards {
    std::shared_ptr<verbs::Card> a, b;
};

// So many pairs of queue pairs that are connected: those of a, and those of b.
inline std::array<QueuePairOf, 2> connected_pairs(const Cards& cards) {
    if (!cards.a || cards.a->is_direct()) return {};
    std::array<QueuePairOf, 2> pairs{std::make_shared<verbs::QueuePair>(cards.a),
                                     std::make_shared<verbs::QueuePair>(cards.b)};
    for (const int side : {0, 1}) pairs[side]->connect(pairs[1 - side]->address());
    return pairs;
}

// Ranks that post in their cards' queues by themselves, before they start, and after they have
// opened a port.
inline void join(TestRank& a, TestRank& b) {
    if (!a.is_direct) return;
    const std::string of_a = a.nic->invite(1), of_b = b.nic->invite(0);
    a.nic->join(1, of_b);
    b.nic->join(0, of_a);
}

// `rounds` puts of sizes that differ in each of two channels, each with a signal, and a credit for
// each that was read. Producer: the warp that puts.
template <class Producer = SpinningWarp>
void run_rounds(uint64_t rounds, std::optional<uint64_t> seed = std::nullopt,
                const Cards& cards = {}) {
    auto a = std::make_unique<TestRank>(0, cards.a);
    auto b = std::make_unique<TestRank>(1, cards.b);
    const Wire wire(seed);
    const auto pairs = connected_pairs(cards);
    join(*a, *b);
    a->nic->start({-1, wire.end(0)}, {nullptr, pairs[0]});
    b->nic->start({wire.end(1), -1}, {pairs[1], nullptr});
    constexpr uint64_t kAhead = 4;
    constexpr size_t kMaxBytes = 100'000;
    const auto bytes_of = [&](uint64_t round) {
        return (round + seed.value_or(0)) % 1000 == 7 ? kMaxBytes : 8 * (1 + round % 5);
    };
    const auto slot_of = [&](uint64_t round, int channel) {
        return kData + (round % kAhead * kChannels + channel) * kMaxBytes;
    };
    static_assert(kData + kAhead * kChannels * kMaxBytes <= kHeapBytes);
    const auto value_of = [](uint64_t round, int channel, size_t at) {  // of each word another one
        return (kChannels * round + channel) | uint64_t{at} << 32;
    };
    std::jthread producer([&] {
        Producer warp;
        for (uint64_t i = 0; i < kChannels * rounds; ++i) {
            const uint64_t round = i / kChannels;
            const int channel = static_cast<int>(i % kChannels);
            auto puts = a->port->queues().puts(channel, 1);
            if (!Producer::kWakes) puts.sleeper = nullptr;
            require(warp.wait_all(Wait::RdmaCredit, 1,
                                  [&](int) {
                                      return WaitCondition{a->flag(kCredits + 8 * channel) + kAhead,
                                                           round + 1, 1};
                                  }),
                    "no credit came");
            const size_t slot = slot_of(round, channel), bytes = bytes_of(round);
            for (size_t at = 0; at < bytes; at += 8) {
                const uint64_t value = value_of(round, channel, at);
                std::memcpy(&a->heap[slot + at], &value, 8);
            }
            require(puts.post_write(warp, 1, slot, slot, static_cast<uint32_t>(bytes)) &&
                        puts.post_add(warp, 1, kFlags + 8 * channel, 1),
                    "no room");
        }
    });
    SpinningWarp warp;
    for (uint64_t i = 0; i < kChannels * rounds; ++i) {
        const uint64_t round = i / kChannels;
        const int channel = static_cast<int>(i % kChannels);
        require(warp.wait_all(Wait::RdmaRow, 1,
                              [&](int) {
                                  return WaitCondition{b->flag(kFlags + 8 * channel), round + 1, 0};
                              }),
                "no signal came");
        const size_t slot = slot_of(round, channel);
        for (size_t at = 0; at < bytes_of(round); at += 8) {
            uint64_t value;
            std::memcpy(&value, &b->heap[slot + at], 8);
            require(value == value_of(round, channel, at), "a signal was seen before its row");
        }
        const auto credits = b->port->queues().credits(channel, 0);
        require(credits.post_add(warp, 0, kCredits + 8 * channel, 1), "no room for a credit");
    }
    producer.join();
    for (int channel = 0; channel < kChannels; ++channel)
        require(b->flag(kFlags + 8 * channel) == rounds, "more or less than was sent");
    require(a->controls[0].abort == 0, "a wait was ended");
    std::jthread other([&] { a->nic->stop(std::chrono::seconds(5)); });
    b->nic->stop(std::chrono::seconds(5));
    other.join();
    require(a->lost(1).empty() && b->lost(0).empty(), a->lost(1) + b->lost(0));
}

}  // namespace ep
