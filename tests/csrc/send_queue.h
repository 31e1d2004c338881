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
    bool relaxes_bells = false;  // for the network what it publishes is not released

    template <Scope>
    static uint64_t acquire(uint64_t* word) {
        return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
    }
    template <Scope scope>
    void publish(uint64_t* word, uint64_t value) {
        const std::atomic_ref<uint64_t> flag(*word);
        if (scope == Scope::System && relaxes_bells)
            flag.store(value, std::memory_order_relaxed);
        else
            flag.store(value, std::memory_order_release);
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

inline void require(bool ok, const std::string& what) {
    if (!ok) throw std::runtime_error(what);
}

inline uint64_t load(const uint64_t& word) {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}

// Until value() is at least so high.
template <class F>
void await(F&& value, uint64_t least, const std::string& otherwise) {
    const auto need = [&](int) { return WaitCondition{value(), least, 1}; };
    require(SpinningWarp().wait_all(Wait::None, 1, need), otherwise);
}

inline void post_write(const SendQueue& queue, size_t dst, size_t src, uint32_t bytes) {
    SpinningWarp warp;
    require(queue.post_write(warp, 1, dst, src, bytes), "no room for a write");
}
inline void post_add(const SendQueue& queue, size_t flag, uint64_t increment = 1) {
    SpinningWarp warp;
    require(queue.post_add(warp, 1, flag, increment), "no room for an addition");
}

struct TestRank {
    alignas(128) std::array<char, kHeapBytes> heap{};
    std::array<ControlBlock, 2> controls{};
    int rank;
    SoftwareNic nic;
    std::shared_ptr<SoftwareNic::Port> port;

    explicit TestRank(int number, const SoftwareNic::Cards& cards = {})
        : rank(number),
          nic(number, {&controls[0], &controls[1]}, cards),
          port(open(heap.data(), kHeapBytes, kChannels)) {}

    std::shared_ptr<SoftwareNic::Port> open(char* memory, size_t bytes, int channels) {
        std::vector<char*> heaps(2, nullptr);
        heaps[rank] = memory;
        return nic.open(heaps, bytes, channels);
    }
    // To the other rank.
    SendQueue puts(int channel = 0) const { return port->queues().puts(channel, 1 - rank); }
    SendQueue credits(int channel) const { return port->queues().credits(channel, 1 - rank); }

    uint64_t flag(size_t offset) const {
        return load(reinterpret_cast<const uint64_t&>(heap[offset]));
    }
    // Why the connection to the other rank broke, once the card has stopped; "" if it did not.
    std::string lost() const {
        const Reason& reason = controls[1 - rank].reason;
        return {reason.text, reason.bytes};
    }
};

// Until the waits of rank 0 have ended, because of rank 1.
inline void wait_until_lost(const TestRank& rank, const char* otherwise) {
    await([&] { return load(rank.controls[0].abort); }, 1, otherwise);
    require(ControlBlock::outcome_of(rank.controls[0].abort) == Outcome::Lost &&
                ControlBlock::rank_of(rank.controls[0].abort) == 1,
            "somebody else is to blame");
}

// What no rank sends ends the connection. pair: of a rank that has a card.
using QueuePairOf = std::shared_ptr<verbs::QueuePair>;
inline void require_refused(TestRank& rank, const Frame& frame, const QueuePairOf& pair = {}) {
    int sockets[2];
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
    rank.nic.start({-1, sockets[0]}, {nullptr, pair});
    require(write(sockets[1], &frame, sizeof frame) == sizeof frame, "no write");
    wait_until_lost(rank, "garbage was taken");
    rank.nic.stop(std::chrono::seconds(0));
    require(rank.lost() == "it sent what no rank sends", rank.lost());
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

// Of two ranks.
using Cards = std::array<SoftwareNic::Cards, 2>;

// A pair of queue pairs that are connected, unless ranks post in the cards' queues by themselves.
inline std::array<QueuePairOf, 2> connected_pairs(const Cards& cards) {
    if (cards[0].empty() || cards[0][0]->is_direct()) return {};
    std::array<QueuePairOf, 2> pairs{std::make_shared<verbs::QueuePair>(cards[0][0]),
                                     std::make_shared<verbs::QueuePair>(cards[1][0])};
    for (const int side : {0, 1}) pairs[side]->connect(pairs[1 - side]->address());
    return pairs;
}

// Ranks 0 and 1, if they post in their cards' queues by themselves: before they start, and after
// they have opened a port.
inline void join(SoftwareNic& a, SoftwareNic& b) {
    if (!a.is_direct()) return;
    const std::string of_a = a.invite(1), of_b = b.invite(0);
    a.join(1, of_b);
    b.join(0, of_a);
}

struct TwoRanks {
    explicit TwoRanks(const Cards& with = {}, std::optional<uint64_t> seed = std::nullopt)
        : cards(with), a(0, cards[0]), b(1, cards[1]) {
        start(seed);
    }
    void start(std::optional<uint64_t> seed = std::nullopt) {
        wire.emplace(seed);
        const auto pairs = connected_pairs(cards);
        join(a.nic, b.nic);
        a.nic.start({-1, wire->end(0)}, {nullptr, pairs[0]});
        b.nic.start({wire->end(1), -1}, {pairs[1], nullptr});
    }
    // When all is carried out; nothing was lost.
    void stop() {
        std::jthread other([&] { a.nic.stop(std::chrono::seconds(5)); });
        b.nic.stop(std::chrono::seconds(5));
        other.join();
        require(a.lost().empty() && b.lost().empty(), a.lost() + b.lost());
    }
    // Before all is.
    void stop_at_once() {
        a.nic.stop(std::chrono::seconds(0));
        b.nic.stop(std::chrono::seconds(0));
    }

    Cards cards;
    TestRank a, b;
    std::optional<Wire> wire;
};

// `rounds` puts of sizes that differ in each of two channels, each with a signal, and a credit for
// each that was read. relaxed: bells are.
inline void run_rounds(uint64_t rounds, std::optional<uint64_t> seed = std::nullopt,
                       const Cards& cards = {}, bool relaxed = false) {
    TwoRanks ranks(cards, seed);
    TestRank &a = ranks.a, &b = ranks.b;
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
    const auto for_puts = [&](auto&& f) {  // f(round, channel, the slot, its bytes)
        for (uint64_t round = 0; round < rounds; ++round) {
            for (int channel = 0; channel < kChannels; ++channel)
                f(round, channel, slot_of(round, channel), bytes_of(round));
        }
    };
    std::jthread producer([&] {
        SpinningWarp warp{relaxed};
        for_puts([&](uint64_t round, int channel, size_t slot, size_t bytes) {
            auto puts = a.puts(channel);
            if (relaxed) puts.sleeper = nullptr;  // to wake the thread orders what was before it
            await([&] { return a.flag(kCredits + 8 * channel) + kAhead; }, round + 1,
                  "no credit came");
            for (size_t at = 0; at < bytes; at += 8) {
                const uint64_t value = value_of(round, channel, at);
                std::memcpy(&a.heap[slot + at], &value, 8);
            }
            require(puts.post_write(warp, 1, slot, slot, static_cast<uint32_t>(bytes)) &&
                        puts.post_add(warp, 1, kFlags + 8 * channel, 1),
                    "no room");
        });
    });
    for_puts([&](uint64_t round, int channel, size_t slot, size_t bytes) {
        await([&] { return b.flag(kFlags + 8 * channel); }, round + 1, "no signal came");
        for (size_t at = 0; at < bytes; at += 8) {
            uint64_t value;
            std::memcpy(&value, &b.heap[slot + at], 8);
            require(value == value_of(round, channel, at), "a signal was seen before its row");
        }
        post_add(b.credits(channel), kCredits + 8 * channel);
    });
    producer.join();
    for (int channel = 0; channel < kChannels; ++channel)
        require(b.flag(kFlags + 8 * channel) == rounds, "more or less than was sent");
    require(a.controls[0].abort == 0, "a wait was ended");
    ranks.stop();
}

}  // namespace ep
