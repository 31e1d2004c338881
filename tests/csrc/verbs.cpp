// Network cards that write to each other's memory, by way of a libibverbs of the tests' own
// (fake_ibverbs.cpp), whose file is the argument: which ports are taken, what is said where one
// cannot be used, the order that flags keep, and what becomes of a rank whose card fails.

#include <dlfcn.h>

#include <map>

#include "fabric/verbs/card.h"
#include "send_queue.h"

namespace ep {
namespace {

class Fake {
  public:
    explicit Fake(const std::string& file) : library(verbs::Library::load(file)) {
        set_ = reinterpret_cast<void (*)(const char*, long long)>(
            dlsym(dlopen(file.c_str(), RTLD_NOW), "fake_ibverbs_set"));
    }
    // Until the end of a test.
    class Setting {
      public:
        Setting(Fake& fake, const char* name, long long value, long long before)
            : fake_(fake), name_(name), before_(before) {
            fake_.set_(name, value);
        }
        ~Setting() { fake_.set_(name_, before_); }
        Setting(const Setting&) = delete;

      private:
        Fake& fake_;
        const char* name_;
        long long before_;
    };
    Setting with(const char* name, long long value, long long before) {
        return {*this, name, value, before};
    }

    verbs::Port port() const { return verbs::find_ports(*library).at(0); }
    std::shared_ptr<verbs::Card> card() const {
        return std::make_shared<verbs::Card>(library, port());
    }
    Cards cards() const { return {card(), card()}; }

    std::shared_ptr<const verbs::Library> library;

  private:
    void (*set_)(const char*, long long);
};

template <class F>
void expect_error(const std::string& part, F&& f) {
    std::string said = "nothing";
    try {
        f();
    } catch (const std::runtime_error& error) {
        said = error.what();
    }
    require(said.find(part) != std::string::npos, "it said " + said + ", not " + part);
}

void check_ports(Fake& fake) {
    expect_error("libnone.so.1", [] { verbs::Library::load("libnone.so.1"); });
    expect_error("has no ibv_get_device_list", [] { verbs::Library::load("libm.so.6"); });
    const auto lacks = [&](const char* name, long long value, long long before) {
        const auto setting = fake.with(name, value, before);
        return fake.port().lacks;
    };
    const verbs::Port port = fake.port();
    require(port.device == "fake_0" && port.number == 1 && port.is_ethernet &&
                port.gid_index == 3 && port.address == "10.99.0.1" && port.lacks.empty(),
            "the port is " + port.address + ", " + port.lacks);
    require(lacks("down", 1, 0) == "it is down", "a port is down");
    require(lacks("atomics", 0, 1) == "it has no atomics", "a card has no atomics");
    require(lacks("iwarp", 1, 0) == "it is neither InfiniBand nor RoCE", "iWARP is taken");
    require(lacks("gids", 1, 4) == "it has no RoCE v2 address", "RoCE v1 is taken");
    require(lacks("gids", 2, 4).empty(), "an address of the link is not taken");
    require(lacks("ethernet", 0, 1).empty(), "InfiniBand is not taken");
    const auto none = fake.with("devices", 0, 1);
    require(verbs::find_ports(*fake.library).empty(), "there is a card");
}

void check_set_up(Fake& fake) {
    std::vector<char> memory(4096);
    {
        const auto setting = fake.with("unregistered", ENOMEM, 0);
        expect_error("ibv_reg_mr: Cannot allocate", [&] { fake.card(); });
    }
    const auto card = fake.card();
    {
        const auto setting = fake.with("unregistered", ENOMEM, 0);
        expect_error("ulimit -l may be too small",
                     [&] { verbs::Region(card, memory.data(), memory.size()); });
    }
    verbs::QueuePair pair(card);
    expect_error("says nothing of its network card", [&] { pair.connect("short"); });
    {
        const std::string far = [&] {
            const auto setting = fake.with("network", 5, 0);
            return verbs::QueuePair(fake.card()).address();
        }();
        expect_error(
            "(10.99.0.1) and fake_0 port 1 (10.99.5.1) cannot be connected: Connection timed out; "
            "the addresses of the two cards must reach each other",
            [&] { pair.connect(far); });
    }
    const auto setting = fake.with("ethernet", 0, 1);
    verbs::QueuePair other(fake.card());
    expect_error("one of them is InfiniBand, the other RoCE",
                 [&] { other.connect(verbs::QueuePair(card).address()); });
}

// A flag that is added to through its own key comes after the data before it. One that is written
// as data is may not: whether it did not.
bool overtakes(Fake& fake, uint64_t seed, bool is_strict) {
    constexpr int kPuts = 20;
    const auto setting = fake.with("seed", static_cast<long long>(seed), 0);
    std::vector<uint64_t> here(kPuts, 1), there(kPuts + 1);
    const Cards cards = fake.cards();
    const auto pairs = connected_pairs(cards, 1);
    const verbs::Region source(cards.a, reinterpret_cast<char*>(here.data()),
                               here.size() * sizeof(uint64_t));
    const verbs::Region target(cards.b, reinterpret_cast<char*>(there.data()),
                               there.size() * sizeof(uint64_t));
    for (uint64_t i = 0; i < kPuts; ++i) {
        pairs[0][0]->write({target.data(), 8 * i}, source, reinterpret_cast<const char*>(&here[i]),
                           8);
    }
    if (is_strict)
        pairs[0][0]->add({target.flags(), 8 * kPuts}, 1);
    else
        pairs[0][0]->write({target.data(), 8 * kPuts}, source,
                           reinterpret_cast<const char*>(here.data()), 8);
    const std::atomic_ref<uint64_t> flag(there[kPuts]);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!flag.load(std::memory_order_acquire)) {
        int done = 0;
        const std::string fault = pairs[0][0]->poll([&] { ++done; });
        require(fault.empty(), fault);
        require(std::chrono::steady_clock::now() < deadline, "no flag came");
        std::this_thread::yield();
    }
    bool missing = false;
    for (int i = 0; i < kPuts; ++i)
        missing |= std::atomic_ref<uint64_t>(there[i]).load(std::memory_order_relaxed) != 1;
    return missing;
}

void check_order(Fake& fake) {
    int overtaken = 0;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
        require(!overtakes(fake, seed, true), "a flag came before its data");
        overtaken += overtakes(fake, seed, false);
    }
    require(overtaken > 0, "these cards keep an order that they do not promise");
}

// Each with a card, connected.
struct TwoRanks {
    TestRank a, b;

    explicit TwoRanks(const Fake& fake) : TwoRanks(fake.cards()) {}

  private:
    explicit TwoRanks(const Cards& cards) : a(0, cards.a), b(1, cards.b) {
        const Wire wire(std::nullopt);
        const auto pairs = connected_pairs(cards, 1);
        a.nic->start({{}, {wire.end(0)}}, {{}, pairs[0]});
        b.nic->start({{wire.end(1)}, {}}, {pairs[1], {}});
    }
};

// Two ranks, until the card of one does what it should not.
void check_failure(Fake& fake, const char* name, const std::string& why) {
    const auto patience = fake.with("retry_ms", 300, 60'000);
    TwoRanks ranks(fake);
    auto& [a, b] = ranks;
    SpinningWarp warp;
    const SendQueue queue = a.port->queues().puts(0, 1);
    require(queue.post_add(warp, 1, 0, 1), "no room");
    require(warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{b.flag(0), 1, 0}; }),
            "no flag came");
    const auto setting = fake.with(name, 1, -1);
    require(queue.post_write(warp, 1, kData, kData, 100) && queue.post_add(warp, 1, 0, 1),
            "no room");
    wait_until_lost(warp, a, "a card that failed was not noticed");
    a.nic->stop(std::chrono::seconds(0));
    b.nic->stop(std::chrono::seconds(0));
    require(a.lost(1).find(why) != std::string::npos, a.lost(1));
    require(b.flag(0) == 1, "what failed was done all the same");
}

// A link that comes back soon: nothing is lost, nothing fails.
void check_short_break(Fake& fake) {
    std::jthread breaks([&] {
        for (int i = 0; i < 3; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            const auto down = fake.with("down", 1, 0);
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
    });
    run_rounds(3'000, std::nullopt, 2, fake.cards());
}

// A part of a buffer that is opened while the network runs, and closed on one side while the other
// still sends to it.
void check_parts(Fake& fake) {
    TwoRanks ranks(fake);
    auto& [a, b] = ranks;
    std::vector<uint64_t> of_a(512), of_b(512);
    const auto open = [](TestRank& rank, int number, std::vector<uint64_t>& memory) {
        std::vector<char*> heaps(2, nullptr);
        heaps[number] = reinterpret_cast<char*>(memory.data());
        return rank.nic->open(heaps, memory.size() * sizeof(uint64_t), 1);
    };
    const auto part_of_a = open(a, 0, of_a);
    SpinningWarp warp;
    const SendQueue queue = part_of_a->queues().puts(0, 1);
    require(queue.post_add(warp, 1, 8, 5), "no room");  // before b has opened its part
    const auto part_of_b = open(b, 1, of_b);
    const std::atomic_ref<uint64_t> flag(of_b[1]);
    require(warp.wait_all(
                Wait::None, 1,
                [&](int) { return WaitCondition{flag.load(std::memory_order_acquire), 5, 1}; }),
            "a part that was opened later is not reached");
    b.nic->close(part_of_b);
    for (int i = 0; i < 100; ++i) require(queue.post_add(warp, 1, 8, 1), "no room");
    a.nic->close(part_of_a);
    require(of_b[1] == 5, "a part that is closed was written to");
    require(a.port->queues().puts(0, 1).post_add(warp, 1, 0, 1), "no room");
    require(warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{b.flag(0), 1, 0}; }),
            "the other part was closed, too");
    std::jthread other([&] { a.nic->stop(std::chrono::seconds(5)); });
    b.nic->stop(std::chrono::seconds(5));
    other.join();
    require(a.lost(1).empty() && b.lost(0).empty(), a.lost(1) + b.lost(0));
}

// What a card carries must not come over TCP.
void check_garbage(Fake& fake) {
    for (const Frame& frame :
         {Frame{Frame::kWrite, 0, 0, 8, 0, 0}, Frame{Frame::kAdd, 0, 0, 0, 0, 1},
          Frame{Frame::kKeys, 0, 0, 8, 0, 0}, Frame{99, 0, 0, 0, 0, 0}}) {
        const Cards cards = fake.cards();
        TestRank rank(0, cards.a);
        require_refused(rank, frame, connected_pairs(cards, 1)[0]);
    }
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    ep::Fake fake(argv[1]);
    ep::check_ports(fake);
    ep::check_set_up(fake);
    ep::check_order(fake);
    ep::check_failure(fake, "silent_after", "the other card confirmed nothing of what was sent");
    ep::check_failure(fake, "refused_after", "the other card refused access to memory");
    ep::check_short_break(fake);
    ep::check_parts(fake);
    ep::check_garbage(fake);
    ep::run_rounds(20'000, std::nullopt, 1, fake.cards());
    for (uint64_t seed = 1; seed <= 200; ++seed) {
        const auto late = fake.with("seed", static_cast<long long>(seed), 0);
        ep::run_rounds(20, seed, 1 + static_cast<int>(seed % 4), fake.cards());
    }
    std::puts("cards keep what they promise");
}
