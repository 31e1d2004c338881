// Network cards that write to each other's memory, by way of a libibverbs of the tests' own
// (fake_ibverbs.cpp), whose file is the argument: which ports are taken, what is said where one
// cannot be used, the order that flags keep, and what becomes of a rank whose card fails. With
// "direct" behind it the ranks post in the cards' queues by themselves.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fabric/queue/card_link.h"
#include "fabric/queue/tcp_link.h"
#include "fabric/queue/verbs_link.h"
#include "fabric/verbs/card.h"
#include "fabric/verbs/direct_pair.h"
#include "send_queue.h"

namespace ep {
namespace {

class Fake {
  public:
    Fake(const std::string& file, bool is_direct) : library(verbs::Library::load(file)) {
        if (is_direct) mlx5 = verbs::Mlx5::load(file);
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

    verbs::Port port() const { return verbs::find_ports(*library, mlx5.get()).at(0); }
    std::shared_ptr<verbs::Card> card(size_t number) const {
        return std::make_shared<verbs::Card>(
            library, verbs::find_ports(*library, mlx5.get()).at(number), mlx5);
    }
    std::shared_ptr<verbs::Card> card() const {
        return std::make_shared<verbs::Card>(library, port(), mlx5);
    }
    Cards cards() const { return {card(), card()}; }

    std::shared_ptr<const verbs::Library> library;
    std::shared_ptr<const verbs::Mlx5> mlx5;

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
    const auto pairs = connected_pairs(cards);
    const verbs::Region source(cards.a, reinterpret_cast<char*>(here.data()),
                               here.size() * sizeof(uint64_t));
    const verbs::Region target(cards.b, reinterpret_cast<char*>(there.data()),
                               there.size() * sizeof(uint64_t));
    for (uint64_t i = 0; i < kPuts; ++i) {
        pairs[0]->write({target.data(), 8 * i}, source, reinterpret_cast<const char*>(&here[i]), 8);
    }
    if (is_strict)
        pairs[0]->add({target.flags(), 8 * kPuts}, 1);
    else
        pairs[0]->write({target.data(), 8 * kPuts}, source,
                        reinterpret_cast<const char*>(here.data()), 8);
    const std::atomic_ref<uint64_t> flag(there[kPuts]);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!flag.load(std::memory_order_acquire)) {
        int done = 0;
        const std::string fault = pairs[0]->poll([&] { ++done; });
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
        const auto pairs = connected_pairs(cards);
        join(a, b);
        a.nic->start({-1, wire.end(0)}, {nullptr, pairs[0]});
        b.nic->start({wire.end(1), -1}, {pairs[1], nullptr});
    }
};

// The first signal of rank 0.
void await_flag(SpinningWarp& warp, TestRank& b) {
    require(warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{b.flag(0), 1, 0}; }),
            "no flag came");
}

// Two ranks, until the card of one does what it should not.
void check_failure(Fake& fake, const char* name, int on, int off, const std::string& why) {
    const auto patience = fake.with("retry_ms", 300, 60'000);
    TwoRanks ranks(fake);
    auto& [a, b] = ranks;
    SpinningWarp warp;
    const auto queue = a.port->queues().puts(0, 1);
    require(queue.post_add(warp, 1, 0, 1), "no room");
    await_flag(warp, b);
    const auto setting = fake.with(name, on, off);
    require(queue.post_write(warp, 1, kData, kData, 100) && queue.post_add(warp, 1, 0, 1),
            "no room");
    wait_until_lost(warp, a, "a card that failed was not noticed");
    wait_until_told(warp, b);
    a.nic->stop(std::chrono::seconds(0));
    b.nic->stop(std::chrono::seconds(0));
    require(a.lost(1).find(why) != std::string::npos, a.lost(1));
    require(b.lost(0) == a.lost(1), b.lost(0));
    require(b.flag(0) == 1, "what failed was done all the same");
}

// A process that is forked while the network runs, and ends.
void check_fork(Fake& fake) {
    auto ranks = std::make_unique<TwoRanks>(fake);
    auto& [a, b] = *ranks;
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        std::atomic_ref<uint64_t>(a.controls[0].abort).store(1);
        a.nic->flush_reports();
        a.nic->close(a.port);
        a.nic->stop(std::chrono::seconds(1));
        ranks.reset();
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    require(status == 0, "a fork ends with " + std::to_string(status));
    SpinningWarp warp;
    require(a.port->queues().puts(0, 1).post_add(warp, 1, 0, 1), "no room");
    await_flag(warp, b);
    std::jthread other([&] { a.nic->stop(std::chrono::seconds(5)); });
    b.nic->stop(std::chrono::seconds(5));
    other.join();
    require(a.lost(1).empty() && b.lost(0).empty(), a.lost(1) + b.lost(0));
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
    run_rounds(3'000, std::nullopt, fake.cards());
}

std::shared_ptr<SoftwareNic::Port> open_part(TestRank& rank, int number,
                                             std::vector<uint64_t>& memory, int channels) {
    std::vector<char*> heaps(2, nullptr);
    heaps[number] = reinterpret_cast<char*>(memory.data());
    return rank.nic->open(heaps, memory.size() * sizeof(uint64_t), channels);
}

// Until rank 0 has added so much to a word of rank 1.
void await(SpinningWarp& warp, uint64_t& word, uint64_t value, const char* otherwise) {
    const std::atomic_ref<uint64_t> flag(word);
    require(warp.wait_all(
                Wait::None, 1,
                [&](int) { return WaitCondition{flag.load(std::memory_order_acquire), value, 1}; }),
            otherwise);
}

// Rank 1 closes its part, of_b, in which a word is 5, while rank 0 posts there; the other part of
// both stays.
void close_while_posted(TwoRanks& ranks, const std::shared_ptr<SoftwareNic::Port>& part_of_a,
                        const std::shared_ptr<SoftwareNic::Port>& part_of_b,
                        const std::vector<uint64_t>& of_b, int posts) {
    auto& [a, b] = ranks;
    SpinningWarp warp;
    const auto queue = part_of_a->queues().puts(0, 1);
    b.nic->close(part_of_b);
    for (int i = 0; i < posts; ++i) require(queue.post_add(warp, 1, 8, 1), "no room");
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

// A part of a buffer that is opened while the network runs, and closed on one side while the other
// still sends to it.
void check_parts(Fake& fake) {
    TwoRanks ranks(fake);
    auto& [a, b] = ranks;
    std::vector<uint64_t> of_a(512), of_b(512);
    const auto part_of_a = open_part(a, 0, of_a, 1);
    SpinningWarp warp;
    const auto queue = part_of_a->queues().puts(0, 1);
    require(queue.post_add(warp, 1, 8, 5), "no room");  // before b has opened its part
    const auto part_of_b = open_part(b, 1, of_b, 1);
    await(warp, of_b[1], 5, "a part that was opened later is not reached");
    close_while_posted(ranks, part_of_a, part_of_b, of_b, 100);
}

// A part is closed, and the other side never says that it posts there no more.
void check_unconfirmed(Fake& fake) {
    const Cards cards = fake.cards();
    TestRank a(0, cards.a);
    const Wire wire(std::nullopt);
    a.nic->start({-1, wire.end(0)}, {nullptr, connected_pairs(cards)[0]});
    a.nic->close(a.port);
    SpinningWarp warp;
    wait_until_lost(warp, a, "who confirms nothing is not lost");
    a.nic->stop(std::chrono::seconds(0));
    require(a.lost(1) == "it took nothing of what a part that is closed had sent", a.lost(1));
    close(wire.end(1));
}

// What is for a region that the other side has closed is told of in its turn, too.
void check_closed_region(Fake& fake) {
    const Cards cards = fake.cards();
    const auto pairs = connected_pairs(cards);
    std::array<uint64_t, 8> of_a{}, of_b{};
    const verbs::Region there(cards.b, reinterpret_cast<char*>(of_b.data()), sizeof of_b);
    const Wire wire(std::nullopt);
    VerbsLink link(std::make_unique<TcpLink>(wire.end(0)), pairs[0]);
    TcpLink other(wire.end(1));
    link.open(0, std::make_shared<verbs::Region>(cards.a, reinterpret_cast<char*>(of_a.data()),
                                                 sizeof of_a));
    const auto hear = [&](const Frame& frame) {
        other.add_copy(frame, {});
        other.send();
        link.receive([](const Frame&) { return nullptr; }, [](const Frame&) {});
    };
    hear({Frame::kKeys, 0, 0, there.data(), there.flags()});
    std::vector<int> told;
    const auto add = [&](int number) {
        require(link.has_room_for(0), "no room");
        link.add({Frame::kAdd, 0, 0, 0, 1}, nullptr, [&told, number] { told.push_back(number); });
    };
    {
        const auto silent = fake.with("silent_after", 0, -1);
        add(1);
        hear({Frame::kClose, 0});
        add(2);
        link.send();
        require(told.empty(), "what comes later is told of first");
    }
    SpinningWarp warp;
    require(warp.wait_all(Wait::None, 1,
                          [&](int) {
                              link.send();
                              return WaitCondition{told.size(), 2, 1};
                          }),
            "what is done is not told of");
    add(3);
    require(told == std::vector{1, 2, 3} && link.end().empty(), "it is not told of in turn");
}

// What a card carries must not come over TCP.
void check_garbage(Fake& fake) {
    for (const Frame& frame : {Frame{Frame::kWrite, 0, 8, 0, 0}, Frame{Frame::kAdd, 0, 0, 0, 1},
                               Frame{Frame::kKeys, 0, 8, 0, 0}, Frame{99, 0, 0, 0, 0}}) {
        const Cards cards = fake.cards();
        TestRank rank(0, cards.a);
        require_refused(rank, frame, connected_pairs(cards)[0]);
    }
}

// ---- ranks that post in a card's queues by themselves

void check_rings(Fake& fake) {
    expect_error("libnone.so.1", [] { verbs::Mlx5::load("libnone.so.1"); });
    expect_error("has no mlx5dv_is_supported: it needs rdma-core",
                 [] { verbs::Mlx5::load("libm.so.6"); });
    {
        const auto setting = fake.with("mlx5", 0, 1);
        require(fake.port().lacks == "it is no card of the driver mlx5",
                "another driver's is taken");
    }
    {
        const auto setting = fake.with("stride", 128, 64);
        expect_error("fake_0 port 1: its driver keeps queues in another form",
                     [&] { verbs::DirectPair(fake.card(), 4); });
    }
    const verbs::DirectPair pair(fake.card(), 4);
    require(pair.rings().entry_count == 8 && pair.rings().completion_count == 8,
            "rings are of another size than this driver's");
    require(pair.is_idle() && pair.fault().empty(), "something was posted");
}

// Two queue pairs of few entries, and memory for each.
struct SmallRings {
    static constexpr uint32_t kDepth = 4;
    using Memory = std::array<uint64_t, 64>;

    explicit SmallRings(const Fake& fake) : cards(fake.cards()) {
        pair.connect(other->address());
        other->connect(pair.address());
        card = queue_in(pair.rings());
        card.data = there.data();
        card.flags = there.flags();
        card.source = here.local_key();
        card.producer = &producer;
        queue.depth = kDepth;
        queue.producer = &producer;
        queue.card = &card;
    }
    uint64_t flag() { return std::atomic_ref<uint64_t>(of_b[0]).load(std::memory_order_acquire); }

    Cards cards;
    Memory of_a{}, of_b{};
    verbs::Region here{cards.a, reinterpret_cast<char*>(of_a.data()), sizeof(Memory)};
    verbs::Region there{cards.b, reinterpret_cast<char*>(of_b.data()), sizeof(Memory)};
    verbs::DirectPair pair{cards.a, kDepth};
    std::shared_ptr<verbs::DirectPair> other = std::make_shared<verbs::DirectPair>(cards.b, kDepth);
    QueueProducer producer{};
    CardQueue card{};
    SendQueue queue{};
};

// Rings that wrap around all the time, and numbers that do once.
void check_small_rings(Fake& fake) {
    SmallRings rings(fake);
    SpinningWarp warp;
    constexpr uint64_t kAdditions = 35'000;  // and as many writes: more than 16 bits can number
    for (uint64_t i = 0; i < kAdditions; ++i) {
        rings.of_a[8 + i % 8] = i;
        require(rings.queue.post_write(warp, 1, 8 * (8 + i % 8), 8 * (8 + i % 8), 8) &&
                    rings.queue.post_add(warp, 1, 0, 1),
                "no room");
        if (i % 100 && i != kAdditions - 1) continue;
        require(warp.wait_all(Wait::None, 1,
                              [&](int) { return WaitCondition{rings.flag(), i + 1, 1}; }),
                "no flag came");
        require(rings.of_b[8 + i % 8] == i, "a flag came before its data");
    }
    require(warp.wait_all(Wait::None, 1,
                          [&](int) { return WaitCondition{rings.pair.is_idle(), 1, 1}; }),
            "what is done is not told of");
    require(rings.pair.fault().empty() && rings.producer.posted == 2 * kAdditions,
            rings.pair.fault());
    const auto silent = fake.with("silent_after", 0, -1);
    require(rings.queue.post_add(warp, 1, 0, 1), "no room");
    require(!rings.pair.is_idle() && rings.pair.fault().empty(), "what is under way is told of");
}

// Where a connection has ended, nothing is written any more.
void check_end(Fake& fake) {
    SmallRings rings(fake);
    SpinningWarp warp;
    const Wire wire(std::nullopt);
    {
        CardLink link(std::make_unique<TcpLink>(wire.end(1)));
        link.open(0, {rings.other});
    }
    close(wire.end(0));
    require(rings.queue.post_add(warp, 1, 0, 1), "no room");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    require(rings.flag() == 0, "what has ended was written to");
}

// Of several cards each has the queues of some channels, and keys of its own; one rank may have
// more cards than another.
void check_several_cards(Fake& fake) {
    const auto three = fake.with("devices", 3, 1);
    const auto other_keys = fake.with("seed", 5, 0);
    TestRank a(0, fake.card(0), {fake.card(1), fake.card(2)});
    TestRank b(1, fake.card(0), {fake.card(1)});
    const Wire wire(std::nullopt);
    join(a, b);
    a.nic->start({-1, wire.end(0)});
    b.nic->start({wire.end(1), -1});
    SpinningWarp warp;
    for (int channel = 0; channel <= kChannels; ++channel) {
        const auto flag = 8 * static_cast<size_t>(channel);
        const size_t data = kData + flag;
        a.heap[data] = 1;
        const auto puts = a.port->queues().puts(channel, 1);
        require(puts.post_write(warp, 1, data, data, 1) && puts.post_add(warp, 1, flag, 1) &&
                    b.port->queues().credits(channel, 0).post_add(warp, 0, kCredits + flag, 1),
                "no room");
        require(
            warp.wait_all(
                Wait::None, 1,
                [&](int) { return WaitCondition{b.flag(flag) + a.flag(kCredits + flag), 2, 1}; }),
            "no flag came");
        require(b.heap[data] == 1, "a flag came before its data");
    }
    // the second of three, and of two, has failed alone
    const auto silent = fake.with("silent", 1, -1);
    const auto patience = fake.with("retry_ms", 300, 60'000);
    require(a.port->queues().puts(0, 1).post_add(warp, 1, 0, 1), "no room");
    require(warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{b.flag(0), 2, 1}; }),
            "another card than the channel's was taken");
    require(a.port->queues().puts(1, 1).post_add(warp, 1, 8, 1), "no room");
    wait_until_lost(warp, a, "a card that failed was not noticed");
    a.nic->stop(std::chrono::seconds(0));
    b.nic->stop(std::chrono::seconds(0));
    require(a.lost(1).find("fake_1 port 1") == 0, a.lost(1));
}

// The network stops, and starts again with other queue pairs; in between nothing is written.
void check_restart(Fake& fake) {
    const Cards cards = fake.cards();
    TestRank a(0, cards.a), b(1, cards.b);
    SpinningWarp warp;
    for (uint64_t round = 1; round <= 3; ++round) {
        const Wire wire(std::nullopt);
        join(a, b);
        a.nic->start({-1, wire.end(0)});
        b.nic->start({wire.end(1), -1});
        const auto queue = a.port->queues().puts(0, 1);
        require(queue.post_add(warp, 1, 0, 1), "no room");
        require(
            warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{b.flag(0), round, 0}; }),
            "no flag came");
        b.nic->stop(std::chrono::seconds(0));
        require(queue.post_add(warp, 1, 8, 1), "no room");
        a.nic->stop(std::chrono::seconds(0));
        require(b.flag(8) == 0, "who has stopped was written to");
        require(a.lost(1).empty() && b.lost(0).empty(), a.lost(1) + b.lost(0));
    }
}

// A key of nobody's, of either side: the cause is named, not that what is behind it was given up;
// and a queue that has failed has room.
void check_wrong_keys(Fake& fake) {
    const auto check = [&](const std::string& why, auto&& change) {
        SmallRings rings(fake);
        change(rings.card);
        SpinningWarp warp;
        const auto post = [&] {
            require(
                rings.queue.post_write(warp, 1, 64, 64, 8) && rings.queue.post_add(warp, 1, 0, 1),
                "a queue that has failed has no room");
        };
        const auto is_over = [&](int) { return WaitCondition{rings.pair.is_idle(), 1, 1}; };
        post();
        require(warp.wait_all(Wait::None, 1, is_over), "what fails is not told of");
        require(rings.flag() == 0, "what failed was done all the same");
        const std::string said = rings.pair.fault();
        require(said.find(why) != std::string::npos, said);
        for (int i = 0; i < 20; ++i) post();
        require(warp.wait_all(Wait::None, 1, is_over), "what fails later is not told of");
        require(!rings.pair.fault().empty(), "an error is forgotten");
    };
    const std::string own = "the own card was refused access to memory (status 4, vendor's 129)";
    const std::string other = "the other card refused access to memory (status 10, vendor's 129)";
    check(other, [](CardQueue& card) { card.data ^= 1; });
    check(other, [](CardQueue& card) { card.flags ^= 1; });
    check(own, [](CardQueue& card) { card.source ^= 1; });
    check(own, [](CardQueue& card) { card.scratch.address = 4090; });
}

// A part that is opened while the network runs, with more queues than queue pairs, and closed on
// one side while the other still sends to it.
void check_direct_parts(Fake& fake) {
    constexpr int kMany = 30;
    TwoRanks ranks(fake);
    auto& [a, b] = ranks;
    std::vector<uint64_t> of_a(512), of_b(512);
    const auto part_of_a = open_part(a, 0, of_a, kMany), part_of_b = open_part(b, 1, of_b, kMany);
    join(a, b);
    SpinningWarp warp;
    const auto queue = part_of_a->queues().puts(0, 1);
    require(queue.post_add(warp, 1, 8, 5), "no room");
    await(warp, of_b[1], 5, "a part that was opened later is not reached");
    for (int i = 0; i < 600; ++i) {
        const auto& queues = part_of_a->queues();
        const auto one = i % 2 ? queues.puts(i % kMany, 1) : queues.credits(i % kMany, 1);
        require(one.post_add(warp, 1, 16 + 8 * (i % kMany), 1), "no room");
    }
    for (int i = 0; i < kMany; ++i)
        await(warp, of_b[2 + i], 600 / kMany,
              "a queue that shares another's rings is not carried out");
    // what was posted before a part is closed arrives
    std::vector<uint64_t> last_of_a(512), last_of_b(512);
    const auto last_part_of_a = open_part(a, 0, last_of_a, kMany),
               last_part_of_b = open_part(b, 1, last_of_b, kMany);
    join(a, b);
    for (int i = 0; i < 100; ++i)
        require(last_part_of_a->queues().puts(0, 1).post_add(warp, 1, 8, 1), "no room");
    a.nic->close(last_part_of_a);
    require(std::atomic_ref<uint64_t>(last_of_b[1]).load() == 100, "what was posted is lost");
    b.nic->close(last_part_of_b);

    close_while_posted(ranks, part_of_a, part_of_b, of_b, 500);
}

// What no rank tells.
void check_invitations(Fake& fake) {
    TestRank a(0, fake.card()), b(1, fake.card());
    const std::string told = b.nic->invite(0);
    expect_error("has other queues", [&] { a.nic->join(1, told); });  // before its own are there
    a.nic->invite(1);
    for (const size_t bytes : {size_t{3}, size_t{16}, told.size() - 1})
        expect_error("says less of its queues", [&] { a.nic->join(1, told.substr(0, bytes)); });
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    const bool is_all = argc > 2 && std::string(argv[argc - 1]) == "all";
    const bool is_direct = argc > 2 && std::string(argv[2]) == "direct";
    if (argc != 2 + is_all + is_direct) return 2;
    ep::Fake fake(argv[1], is_direct);
    if (is_direct) {
        ep::check_rings(fake);
        ep::check_small_rings(fake);
        ep::check_wrong_keys(fake);
        ep::check_end(fake);
        ep::check_restart(fake);
        ep::check_several_cards(fake);
        for (int i = 0; i < 10; ++i) ep::check_direct_parts(fake);  // who is first matters
        ep::check_invitations(fake);
    } else {
        ep::check_ports(fake);
        ep::check_set_up(fake);
        ep::check_order(fake);
        ep::check_parts(fake);
        ep::check_closed_region(fake);
        ep::check_unconfirmed(fake);
        ep::check_failure(fake, "unposted", ENOMEM, 0, "ibv_post_send: Cannot allocate memory");
        ep::check_garbage(fake);
    }
    ep::check_failure(fake, "silent_after", 1, -1,
                      "the other card confirmed nothing of what was sent");
    ep::check_failure(fake, "refused_after", 1, -1, "the other card refused access to memory");
    ep::check_short_break(fake);
    ep::check_fork(fake);
    ep::run_rounds(is_all ? 20'000 : 300, std::nullopt, fake.cards());
    for (uint64_t seed = 1; seed <= (is_all ? 200 : 6); ++seed) {
        const auto late = fake.with("seed", static_cast<long long>(seed), 0);
        ep::run_rounds(20, seed, fake.cards());
    }
    std::puts("cards keep what they promise");
}
