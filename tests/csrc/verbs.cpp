// Network cards that write to each other's memory, by way of a libibverbs of the tests' own
// (fake_ibverbs.cpp), whose file is the argument: which ports are taken, what is said where one
// cannot be used, the order that flags keep, and what becomes of a rank whose card fails. With
// "direct" behind it the ranks post in the cards' queues by themselves.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "expect.h"
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
    std::shared_ptr<verbs::Card> card() const { return card(0); }
    Cards cards() const { return {SoftwareNic::Cards{card()}, {card()}}; }

    std::shared_ptr<const verbs::Library> library;
    std::shared_ptr<const verbs::Mlx5> mlx5;

  private:
    void (*set_)(const char*, long long);
};

template <class F>
void expect_error(const std::string& part, F&& f) {
    const std::string said = error_of(f);
    require(said.find(part) != std::string::npos, "it said '" + said + "', not " + part);
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

template <class Words>
std::shared_ptr<const verbs::Region> region_of(const SoftwareNic::Cards& cards, Words& words) {
    return std::make_shared<verbs::Region>(cards[0], reinterpret_cast<char*>(words.data()),
                                           words.size() * sizeof(uint64_t));
}

// A flag that is added to through its own key comes after the data before it. One that is written
// as data is may not: whether it did not.
bool overtakes(Fake& fake, uint64_t seed, bool is_strict) {
    constexpr int kPuts = 20;
    const auto setting = fake.with("seed", static_cast<long long>(seed), 0);
    std::vector<uint64_t> here(kPuts, 1), there(kPuts + 1);
    const Cards cards = fake.cards();
    const auto pairs = connected_pairs(cards);
    const auto source = region_of(cards[0], here), target = region_of(cards[1], there);
    const auto write = [&](uint64_t i) {
        pairs[0]->write({target->data(), 8 * i}, *source,
                        reinterpret_cast<const char*>(&here[i % kPuts]), 8);
    };
    for (uint64_t i = 0; i < kPuts; ++i) write(i);
    is_strict ? void(pairs[0]->add({target->flags(), 8 * kPuts}, 1)) : write(kPuts);
    const auto flag = [&] {
        const std::string fault = pairs[0]->poll([] {});
        require(fault.empty(), fault);
        return load(there[kPuts]);
    };
    await(flag, 1, "no flag came");
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

// A process that is forked while the network runs, and ends.
void check_fork(Fake& fake) {
    auto ranks = std::make_unique<TwoRanks>(fake.cards());
    TestRank &a = ranks->a, &b = ranks->b;
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        std::atomic_ref<uint64_t>(a.controls[0].abort).store(1);
        a.nic.flush_reports();
        a.nic.close(a.port);
        a.nic.stop(std::chrono::seconds(1));
        ranks.reset();
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    require(status == 0, "a fork ends with " + std::to_string(status));
    post_add(a.puts(), 0);
    await([&] { return b.flag(0); }, 1, "no flag came");
    ranks->stop();
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

// A part of a rank's memory, with queues to the other's.
struct Part {
    Part(TestRank& rank, int channels)
        : port(rank.open(reinterpret_cast<char*>(words.data()), sizeof words, channels)) {}

    std::array<uint64_t, 512> words{};
    std::shared_ptr<SoftwareNic::Port> port;
};

// Rank 1 closes its part, in which a word is 5, while rank 0 posts there; the other part of both
// stays.
void close_while_posted(TwoRanks& ranks, const Part& of_a, const Part& of_b, int posts) {
    TestRank &a = ranks.a, &b = ranks.b;
    b.nic.close(of_b.port);
    for (int i = 0; i < posts; ++i) post_add(of_a.port->queues().puts(0, 1), 8);
    a.nic.close(of_a.port);
    require(of_b.words[1] == 5, "a part that is closed was written to");
    post_add(a.puts(), 0);
    await([&] { return b.flag(0); }, 1, "the other part was closed, too");
    ranks.stop();
}

// A part of a buffer that is opened while the network runs, and closed on one side while the other
// still sends to it.
void check_parts(Fake& fake) {
    TwoRanks ranks(fake.cards());
    const Part of_a(ranks.a, 1);
    post_add(of_a.port->queues().puts(0, 1), 8, 5);  // before b has opened its part
    const Part of_b(ranks.b, 1);
    await([&] { return load(of_b.words[1]); }, 5, "a part that was opened later is not reached");
    close_while_posted(ranks, of_a, of_b, 100);
}

// A part is closed, and the other side never says that it posts there no more.
void check_unconfirmed(Fake& fake) {
    const Cards cards = fake.cards();
    TestRank a(0, cards[0]);
    const Wire wire(std::nullopt);
    a.nic.start({-1, wire.end(0)}, {nullptr, connected_pairs(cards)[0]});
    a.nic.close(a.port);
    wait_until_lost(a, "who confirms nothing is not lost");
    a.nic.stop(std::chrono::seconds(0));
    require(a.lost() == "it took nothing of what a part that is closed had sent", a.lost());
    close(wire.end(1));
}

// What is for a region that the other side has closed is told of in its turn, too.
void check_closed_region(Fake& fake) {
    const Cards cards = fake.cards();
    std::array<uint64_t, 8> of_a{}, of_b{};
    const auto there = region_of(cards[1], of_b);
    const auto pairs = connected_pairs(cards);
    const Wire wire(std::nullopt);
    VerbsLink link(std::make_unique<TcpLink>(wire.end(0)), pairs[0]);
    TcpLink other(wire.end(1));
    link.open(0, region_of(cards[0], of_a));
    const auto hear = [&](const Frame& frame) {
        other.add_copy(frame, {});
        other.send();
        link.receive([](const Frame&) { return nullptr; }, [](const Frame&) {});
    };
    hear({Frame::kKeys, 0, 0, there->data(), there->flags()});
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
    await([&] { return link.send(), told.size(); }, 2, "what is done is not told of");
    add(3);
    require(told == std::vector{1, 2, 3} && link.end().empty(), "it is not told of in turn");
}

// What a card carries must not come over TCP.
void check_garbage(Fake& fake) {
    for (const Frame& frame : {Frame{Frame::kWrite, 0, 8, 0, 0}, Frame{Frame::kAdd, 0, 0, 0, 1},
                               Frame{Frame::kKeys, 0, 8, 0, 0}, Frame{99, 0, 0, 0, 0}}) {
        const Cards cards = fake.cards();
        TestRank rank(0, cards[0]);
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
    require(pair.queue().last_entry == 7 && pair.queue().last_completion == 7,
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
        card = pair.queue();
        card.data = there->data();
        card.flags = there->flags();
        card.source = here->local_key();
        card.producer = &producer;
        queue.depth = kDepth;
        queue.producer = &producer;
        queue.card = &card;
    }
    uint64_t flag() const { return load(of_b[0]); }

    Cards cards;
    Memory of_a{}, of_b{};
    std::shared_ptr<const verbs::Region> here = region_of(cards[0], of_a),
                                         there = region_of(cards[1], of_b);
    verbs::DirectPair pair{cards[0][0], kDepth};
    std::shared_ptr<verbs::DirectPair> other =
        std::make_shared<verbs::DirectPair>(cards[1][0], kDepth);
    QueueProducer producer{};
    CardQueue card{};
    SendQueue queue{};
};

// Rings that wrap around all the time, and numbers that do once.
void check_small_rings(Fake& fake) {
    constexpr uint64_t kAdditions = 35'000;  // and as many writes: more than 16 bits can number
    SmallRings rings(fake);
    for (uint64_t i = 0; i < kAdditions; ++i) {
        const size_t word = 8 + i % 8;
        rings.of_a[word] = i;
        post_write(rings.queue, 8 * word, 8 * word, 8);
        post_add(rings.queue, 0);
        if (i % 100 && i != kAdditions - 1) continue;
        await([&] { return rings.flag(); }, i + 1, "no flag came");
        require(rings.of_b[word] == i, "a flag came before its data");
    }
    await([&] { return rings.pair.is_idle(); }, 1, "what is done is not told of");
    require(rings.pair.fault().empty() && rings.producer.posted == 2 * kAdditions,
            rings.pair.fault());
    const auto silent = fake.with("silent_after", 0, -1);
    post_add(rings.queue, 0);
    require(!rings.pair.is_idle() && rings.pair.fault().empty(), "what is under way is told of");
}

// Where a connection has ended, nothing is written any more.
void check_end(Fake& fake) {
    SmallRings rings(fake);
    const Wire wire(std::nullopt);
    {
        CardLink link(std::make_unique<TcpLink>(wire.end(1)));
        link.open(0, {rings.other});
    }
    close(wire.end(0));
    post_add(rings.queue, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    require(rings.flag() == 0, "what has ended was written to");
}

// Of several cards each has the queues of some channels, and keys of its own; one rank may have
// more cards than another.
void check_several_cards(Fake& fake) {
    const auto three = fake.with("devices", 3, 1);
    const auto other_keys = fake.with("seed", 5, 0);
    TwoRanks ranks({SoftwareNic::Cards{fake.card(0), fake.card(1), fake.card(2)},
                    {fake.card(0), fake.card(1)}});
    TestRank &a = ranks.a, &b = ranks.b;
    for (int channel = 0; channel <= kChannels; ++channel) {
        const auto flag = 8 * static_cast<size_t>(channel);
        const size_t data = kData + flag;
        a.heap[data] = 1;
        post_write(a.puts(channel), data, data, 1);
        post_add(a.puts(channel), flag);
        post_add(b.credits(channel), kCredits + flag);
        await([&] { return b.flag(flag) + a.flag(kCredits + flag); }, 2, "no flag came");
        require(b.heap[data] == 1, "a flag came before its data");
    }
    // the second of three, and of two, has failed alone
    const auto silent = fake.with("silent", 1, -1);
    const auto patience = fake.with("retry_ms", 300, 60'000);
    post_add(a.puts(0), 0);
    await([&] { return b.flag(0); }, 2, "another card than the channel's was taken");
    post_add(a.puts(1), 8);
    wait_until_lost(a, "a card that failed was not noticed");
    ranks.stop_at_once();
    require(a.lost().find("fake_1 port 1") == 0, a.lost());
}

// The network stops, and starts again with other queue pairs; in between nothing is written.
void check_restart(Fake& fake) {
    TwoRanks ranks(fake.cards());
    TestRank &a = ranks.a, &b = ranks.b;
    for (uint64_t round = 1; round <= 3; ++round) {
        if (round > 1) ranks.start();
        post_add(a.puts(), 0);
        await([&] { return b.flag(0); }, round, "no flag came");
        b.nic.stop(std::chrono::seconds(0));
        post_add(a.puts(), 8);
        a.nic.stop(std::chrono::seconds(0));
        require(b.flag(8) == 0, "who has stopped was written to");
        require(a.lost().empty() && b.lost().empty(), a.lost() + b.lost());
    }
}

// A key of nobody's, of either side: the cause is named, not that what is behind it was given up;
// and a queue that has failed has room.
void check_wrong_keys(Fake& fake) {
    const auto check = [&](const std::string& why, auto&& change) {
        SmallRings rings(fake);
        change(rings.card);
        const auto post = [&] {
            post_write(rings.queue, 64, 64, 8);
            post_add(rings.queue, 0);
        };
        const auto is_over = [&] { return rings.pair.is_idle(); };
        post();
        await(is_over, 1, "what fails is not told of");
        require(rings.flag() == 0, "what failed was done all the same");
        const std::string said = rings.pair.fault();
        require(said.find(why) != std::string::npos, said);
        for (int i = 0; i < 20; ++i) post();
        await(is_over, 1, "what fails later is not told of");
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
    TwoRanks ranks(fake.cards());
    TestRank &a = ranks.a, &b = ranks.b;
    const Part of_a(a, kMany), of_b(b, kMany);
    join(a.nic, b.nic);
    const SendQueues& queues = of_a.port->queues();
    post_add(queues.puts(0, 1), 8, 5);
    await([&] { return load(of_b.words[1]); }, 5, "a part that was opened later is not reached");
    for (int i = 0; i < 600; ++i)
        post_add(i % 2 ? queues.puts(i % kMany, 1) : queues.credits(i % kMany, 1),
                 16 + 8 * (i % kMany));
    for (int i = 0; i < kMany; ++i)
        await([&] { return load(of_b.words[2 + i]); }, 600 / kMany,
              "a queue that shares another's rings is not carried out");
    // what was posted before a part is closed arrives
    const Part last_of_a(a, kMany), last_of_b(b, kMany);
    join(a.nic, b.nic);
    for (int i = 0; i < 100; ++i) post_add(last_of_a.port->queues().puts(0, 1), 8);
    a.nic.close(last_of_a.port);
    require(load(last_of_b.words[1]) == 100, "what was posted is lost");
    b.nic.close(last_of_b.port);

    close_while_posted(ranks, of_a, of_b, 500);
}

// What no rank tells.
void check_invitations(Fake& fake) {
    TestRank a(0, {fake.card()}), b(1, {fake.card()});
    const std::string told = b.nic.invite(0);
    expect_error("has other queues", [&] { a.nic.join(1, told); });  // before its own are there
    a.nic.invite(1);
    for (const size_t bytes : {size_t{3}, size_t{16}, told.size() - 1})
        expect_error("says less of its queues", [&] { a.nic.join(1, told.substr(0, bytes)); });
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
        ep::check_garbage(fake);
    }
    ep::check_short_break(fake);
    ep::check_fork(fake);
    ep::run_rounds(is_all ? 20'000 : 300, std::nullopt, fake.cards());
    for (uint64_t seed = 1; seed <= (is_all ? 200 : 6); ++seed) {
        const auto late = fake.with("seed", static_cast<long long>(seed), 0);
        ep::run_rounds(20, seed, fake.cards());
    }
    std::puts("cards keep what they promise");
}
