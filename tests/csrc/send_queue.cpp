// Queues whose numbers wrap around, two ranks over a socket, and what a rank does about bytes that
// no rank sends.

#include "send_queue.h"

#include <unistd.h>

#include <functional>

#include "fabric/queue/tcp_link.h"

namespace ep {
namespace {

// Who has a place in a ring of completions in which round.
void check_completions() {
    Completion completion;
    const auto word = [&] { return *completion.last_word(); };
    completion.report(0, Completion::kNothingYet);
    require(!Completion::is_there(word(), 0) && !Completion::is_there(word(), 1),
            "a completion is there before the first");
    for (uint64_t round = 0; round < 4; ++round) {
        for (const uint64_t kind :
             {Completion::kDone, Completion::kRequestError, Completion::kResponseError}) {
            completion.report(0xabcd, kind, round);
            require(completion.entry == 0xabcd && completion.kind == (kind << 4 | (round & 1)),
                    "a completion says something else");
            require(Completion::is_there(word(), round) && !Completion::is_there(word(), round + 1),
                    "a completion is of another round");
            require(Completion::is_error(word()) == (kind != Completion::kDone),
                    "an error is taken for success");
        }
    }
}

// Carries out what was posted while it waits for room.
struct HelpingWarp : SpinningWarp {
    std::function<void()> help;

    template <class F>
    bool wait_all(Wait, int, F&& need) {
        for (WaitCondition mine = need(0); mine.observed < mine.required; mine = need(0)) help();
        return true;
    }
};

// A queue, and what carries it out: a card that has rings larger than the queue is deep, some of
// whose completions are errors, or whoever looks at the doorbell.
struct Rings {
    Rings(uint32_t depth, bool of_card) : entries(4 * depth), completions(2 * depth) {
        if (!of_card) {
            queue = {entries.data(), depth,           1,         0,       0,
                     &doorbell,      &completions[0], &producer, nullptr, nullptr};
            queue.clear();
            return;
        }
        for (Completion& completion : completions) completion.report(0, Completion::kNothingYet);
        card.entries = entries.data();
        card.doorbell = &doorbell;
        card.bell = &bell;
        card.completions = completions.data();
        card.last_entry = 4 * depth - 1;
        card.last_completion = 2 * depth - 1;
        card.completion_bits = static_cast<uint32_t>(std::countr_zero(2 * depth));
        queue.depth = depth;
        queue.producer = &producer;
        queue.card = &card;
    }
    Rings(const Rings&) = delete;

    // The end of what may be carried out.
    uint64_t rung() const {
        const auto index = std::bit_cast<SendEntry::Begin>(bell).index_and_opcode >> 8;
        const uint64_t end = !queue.card ? queue.rung() : bell ? index + 1 : 0;
        return taken + static_cast<uint16_t>(end - taken);
    }
    void take_one() {
        require(queue.place_of(taken).index() == static_cast<uint16_t>(taken),
                "an entry is not where its number says");
        const uint64_t kind = taken % 7 ? Completion::kDone : Completion::kRequestError;
        if (queue.card)
            completions[taken & card.last_completion].report(static_cast<uint16_t>(taken), kind,
                                                             taken >> card.completion_bits);
        else
            completions[0].report(static_cast<uint16_t>(taken), Completion::kDone);
        ++taken;
    }

    std::vector<SendEntry> entries;
    std::vector<Completion> completions;
    uint64_t doorbell = 0, bell = 0, taken = 0;
    QueueProducer producer{};
    CardQueue card{};
    SendQueue queue{};
};

// Producers and what carries out, in turns, with queues of all small depths, whose numbers wrap
// around at 2^16.
void check_wrap(uint32_t depth, bool of_card) {
    Rings rings(depth, of_card);
    const uint64_t &posted = rings.producer.posted, &taken = rings.taken;
    HelpingWarp warp;
    bool was_full = false;
    warp.help = [&] {
        was_full = true;
        require(taken < rings.rung(), "a full queue was not rung");
        rings.take_one();
        // Now and then up to the middle of the ring, as a card that holds back the other half.
        while (posted % 5 == 0 && taken < posted - depth / 2 + 1) rings.take_one();
    };
    for (uint64_t i = 0; i < 70'000; ++i) {
        const bool is_write = i % 3 == 0;
        if (is_write) rings.queue.post_write(warp, 1, 0, 0, 8);
        if (!is_write) rings.queue.post_add(warp, 1, 0, 1);
        require(posted == i + 1 && posted - taken <= depth,
                "more is posted than there is room for");
        require(is_write || rings.rung() == i + 1, "an addition did not ring");
        while (i % 11 == 0 && taken < rings.rung()) rings.take_one();
    }
    require(was_full, "the queue was never full");
}

// What ends a connection, and all waits of the rank with it.
void check_garbage() {
    std::vector<Frame> frames = {
        {99, 0, 0, 0, 0},                            // no kind of frame
        {Frame::kWrite, 9, 8, 0, 0},                 // no such region
        {Frame::kWrite, 0, 8, kHeapBytes, 0},        // behind its end
        {Frame::kWrite, 0, 8, ~uint64_t{0} - 3, 0},  // so far that a sum overflows
        {Frame::kWrite, 0, 1 << 30, 0, 0},           // more than any rank puts at once
        {Frame::kAdd, 0, 0, 4, 1},                   // not aligned
        {Frame::kAdd, 0, 8, 0, 1},                   // with bytes behind it
        {Frame::kAbort, 0, 0, 0, 99},                // no outcome
        {Frame::kAbort, 0, 0, 0,
         ControlBlock::abort_word(Outcome::Aborted, 1)},  // nor what is told
        {Frame::kAbort, 0, 0, 0, ControlBlock::abort_word(Outcome::CutOff, 1)},
        {Frame::kAbort, 0, 0, 0, ControlBlock::abort_word(Outcome::Failed, 2)},  // of nobody
        {Frame::kStatus, 0, 7, 0, 0},  // not of a status's size
    };
    for (const Frame& frame : frames) {
        TestRank rank(0);
        require_refused(rank, frame);
        for (const char byte : rank.heap) require(byte == 0, "garbage was written");
    }
}

// What was sent has arrived only after it was asked for so many times.
class LateLink : public TcpLink {
  public:
    LateLink(int descriptor, int times) : TcpLink(descriptor), left_(times) {}
    bool is_acknowledged() const override { return left_ == 0 || --left_ == 0; }
    bool has_arrived() const { return left_ == 0; }

  private:
    mutable int left_;
};

// The abort word in what there is to read; 0: none.
uint64_t abort_word_in(int socket) {
    Frame frame;
    uint64_t word = 0;
    while (recv(socket, &frame, sizeof frame, MSG_DONTWAIT) == sizeof frame) {
        if (frame.kind == Frame::kAbort) word = frame.increment;
        std::vector<char> behind(frame.bytes);
        if (behind.empty()) continue;
        require(recv(socket, behind.data(), behind.size(), MSG_DONTWAIT) == ssize_t{frame.bytes},
                "a frame ends early");
    }
    return word;
}

// Of a failure that only the rank's own word says, as a GPU leaves it: the other machine has it
// when flush_reports returns, unless the others go on without this rank.
void check_flush_reports() {
    for (const Outcome outcome : {Outcome::Timeout, Outcome::CutOff}) {
        for (const int times : {0, 0, 0, 5}) {
            TestRank rank(0);
            rank.nic.flush_reports();  // does not run yet
            int sockets[2];
            require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
            SoftwareNic::Links links(2);
            links[1] = std::make_unique<LateLink>(sockets[0], times);
            const auto& link = static_cast<const LateLink&>(*links[1]);
            rank.nic.start_over(std::move(links));
            std::this_thread::sleep_for(
                std::chrono::milliseconds(5));  // until it has a poll_interval
            const uint64_t word = ControlBlock::abort_word(outcome, 0);
            std::atomic_ref<uint64_t>(rank.controls[0].abort).store(word);
            rank.nic.flush_reports();
            require(link.has_arrived(), "what is on its way may be taken back");
            require(abort_word_in(sockets[1]) == (outcome == Outcome::CutOff ? 0 : word),
                    "the other machine knows less, or more");
            rank.nic.stop(std::chrono::seconds(0));
            close(sockets[1]);
        }
    }
}

// A rank whose network stops has told before how far it has come.
void check_goodbye() {
    TwoRanks ranks;
    TestRank &a = ranks.a, &b = ranks.b;
    const auto set = [&](uint64_t call) {
        std::atomic_ref<uint64_t>(a.controls[0].finished.transfer).store(call);
    };
    const auto heard = [&] { return load(b.controls[0].finished.transfer); };
    set(1);
    await(heard, 1, "it tells nothing");
    require(b.nic.ranks_that_left().empty(), "it has not left");
    set(2);
    a.nic.stop(std::chrono::seconds(5));
    await([&] { return b.nic.ranks_that_left().size(); }, 1, "no goodbye came");
    require(b.nic.ranks_that_left() == std::vector{0} && heard() == 2,
            "a goodbye came before what was to be said");
    require(b.controls[1].abort == 0 && b.lost().empty(), "a goodbye is taken for a loss");
    b.nic.stop(std::chrono::seconds(0));
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    ep::check_completions();
    for (const uint32_t depth : {2, 4, 8}) {
        for (const bool of_card : {false, true}) ep::check_wrap(depth, of_card);
    }
    ep::check_garbage();
    ep::check_flush_reports();
    ep::check_goodbye();
    const bool is_all = argc == 2 && std::string(argv[1]) == "all";
    ep::run_rounds(is_all ? 70'000 : 1'500);
    for (uint64_t seed = 0; seed < (is_all ? 1'000 : 25); ++seed) ep::run_rounds(20, seed);
    std::puts("every signal came after its puts");
}
