// The format of entries, byte by byte; two ranks over a socket; and what a rank does about bytes
// that no rank sends.

#include "send_queue.h"

#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <random>

#include "fabric/queue/tcp_link.h"

#if __has_include(<infiniband/mlx5dv.h>)
#include <infiniband/mlx5dv.h>
#define SAME_PLACE(ours, field, theirs, other)                        \
    static_assert(offsetof(ours, field) == offsetof(theirs, other) && \
                  sizeof(ours::field) == sizeof(theirs::other))
using ep::SendEntry;
static_assert(sizeof(SendEntry) == MLX5_SEND_WQE_BB);
static_assert(sizeof(SendEntry::Control) == sizeof(mlx5_wqe_ctrl_seg));
SAME_PLACE(SendEntry::Control, index_and_opcode, mlx5_wqe_ctrl_seg, opmod_idx_opcode);
SAME_PLACE(SendEntry::Control, queue_and_size, mlx5_wqe_ctrl_seg, qpn_ds);
SAME_PLACE(SendEntry::Control, signature, mlx5_wqe_ctrl_seg, signature);
SAME_PLACE(SendEntry::Control, flags, mlx5_wqe_ctrl_seg, fm_ce_se);
SAME_PLACE(SendEntry::Control, immediate, mlx5_wqe_ctrl_seg, imm);
static_assert(sizeof(SendEntry::Remote) == sizeof(mlx5_wqe_raddr_seg));
SAME_PLACE(SendEntry::Remote, address, mlx5_wqe_raddr_seg, raddr);
SAME_PLACE(SendEntry::Remote, key, mlx5_wqe_raddr_seg, rkey);
static_assert(sizeof(SendEntry::Local) == sizeof(mlx5_wqe_data_seg));
SAME_PLACE(SendEntry::Local, bytes, mlx5_wqe_data_seg, byte_count);
SAME_PLACE(SendEntry::Local, key, mlx5_wqe_data_seg, lkey);
SAME_PLACE(SendEntry::Local, address, mlx5_wqe_data_seg, addr);
static_assert(sizeof(SendEntry::Atomic) == sizeof(mlx5_wqe_atomic_seg));
SAME_PLACE(SendEntry::Atomic, increment, mlx5_wqe_atomic_seg, swap_add);
SAME_PLACE(SendEntry::Atomic, compare, mlx5_wqe_atomic_seg, compare);
static_assert(SendEntry::kWrite == MLX5_OPCODE_RDMA_WRITE);
static_assert(SendEntry::kFetchAdd == MLX5_OPCODE_ATOMIC_FA);
static_assert(SendEntry::kReportCompletion == MLX5_WQE_CTRL_CQ_UPDATE);
static_assert(sizeof(ep::Completion) == sizeof(mlx5_cqe64));
SAME_PLACE(ep::Completion, opcode_and_queue, mlx5_cqe64, sop_drop_qpn);
SAME_PLACE(ep::Completion, entry, mlx5_cqe64, wqe_counter);
SAME_PLACE(ep::Completion, signature, mlx5_cqe64, signature);
SAME_PLACE(ep::Completion, kind, mlx5_cqe64, op_own);
static_assert(sizeof(ep::Completion) == sizeof(mlx5_err_cqe));
SAME_PLACE(ep::Completion, vendor_syndrome, mlx5_err_cqe, vendor_err_synd);
SAME_PLACE(ep::Completion, syndrome, mlx5_err_cqe, syndrome);
SAME_PLACE(ep::Completion, opcode_and_queue, mlx5_err_cqe, s_wqe_opcode_qpn);
SAME_PLACE(ep::Completion, entry, mlx5_err_cqe, wqe_counter);
SAME_PLACE(ep::Completion, kind, mlx5_err_cqe, op_own);
static_assert(ep::Completion::kDone == MLX5_CQE_REQ);
static_assert(ep::Completion::kRequestError == MLX5_CQE_REQ_ERR);
static_assert(ep::Completion::kResponseError == MLX5_CQE_RESP_ERR);
static_assert(ep::Completion::kNothingYet == MLX5_CQE_INVALID);
static_assert(offsetof(ep::DoorbellRecord, receive) == MLX5_RCV_DBR * sizeof(uint32_t));
static_assert(offsetof(ep::DoorbellRecord, send) == MLX5_SND_DBR * sizeof(uint32_t));
#endif

namespace ep {
namespace {

void expect_bytes(const SendEntry& entry, const char* hexadecimal) {
    std::string found;
    for (size_t i = 0; i < sizeof entry; ++i) {
        char text[3];
        std::snprintf(text, sizeof text, "%02x", reinterpret_cast<const unsigned char*>(&entry)[i]);
        found += text;
    }
    require(found == hexadecimal, "an entry is " + found);
}

void check_format() {
    const SendEntry write = SendEntry::write_of(0xabcd, 0x123456, {7, 0x1122334455667788},
                                                {0xa1b2c3d4, 0x99aa}, 0x10000);
    expect_bytes(write,
                 "00abcd08"
                 "12345603"
                 "00000008"
                 "00000000"
                 "1122334455667788"
                 "00000007"
                 "00000000"
                 "00010000"
                 "a1b2c3d4"
                 "00000000000099aa"
                 "00000000000000000000000000000000");
    const SendEntry add = SendEntry::add_of(1, 2, {3, 0x40}, 0x0102030405060708, {0xe5f60718, 8});
    expect_bytes(add,
                 "00000112"
                 "00000204"
                 "00000008"
                 "00000000"
                 "0000000000000040"
                 "00000003"
                 "00000000"
                 "0102030405060708"
                 "0000000000000000"
                 "00000008"
                 "e5f60718"
                 "0000000000000008");
    require(add.begin() == SendEntry::begin_of_add(1, 2) && add.begin() != write.begin(),
            "an addition begins with something else");
}

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

// Does something while it waits.
struct HelpingWarp : SpinningWarp {
    std::function<void()> help;

    template <class F>
    bool wait_all(Wait, int, F&& need) {
        for (WaitCondition mine = need(0); mine.observed < mine.required; mine = need(0)) help();
        return true;
    }
};

// Producers and what carries out, in turns, with queues of all small depths, whose numbers wrap
// around at 2^16.
void check_wrap() {
    for (uint32_t depth = 2; depth <= 8; depth *= 2) {
        std::vector<SendEntry> entries(depth);
        uint64_t doorbell;
        SendQueue::Producer producer{};
        Completion completion;
        const SendQueue queue{entries.data(), depth,       1,         0,       0,
                              &doorbell,      &completion, &producer, nullptr, nullptr};
        queue.clear();
        uint64_t taken = 0;
        const auto take_one = [&] {
            require(queue.entries[taken & (depth - 1)].index() == static_cast<uint16_t>(taken),
                    "an entry is not where its number says");
            completion.report(static_cast<uint16_t>(taken++), Completion::kDone);
        };
        HelpingWarp warp;
        bool was_full = false;
        warp.help = [&] {
            was_full = true;
            require(static_cast<uint16_t>(taken) != queue.rung(), "a full queue was not rung");
            take_one();
        };
        for (uint64_t i = 0; i < 70'000; ++i) {
            const bool is_write = i % 3 == 0;
            if (is_write) queue.post_write(warp, 1, 0, 0, 8);
            if (!is_write) queue.post_add(warp, 1, 0, 1);
            require(producer.posted == i + 1 && producer.posted - taken <= depth,
                    "more is posted than there is room for");
            const auto rung = static_cast<uint16_t>(is_write ? queue.rung() : i + 1);
            require(queue.rung() == rung, "an addition did not ring");
            while (i % 11 == 0 && static_cast<uint16_t>(taken) != queue.rung()) take_one();
        }
        require(was_full, "the queue was never full");
    }
}

// A queue of a card's: what a driver gives, in rings larger than the queue is deep.
struct CardMemory {
    static constexpr uint32_t kNumber = 0xabcdef;
    static constexpr uint32_t kData = 0x11, kFlags = 0x22, kSource = 0x33, kScratch = 0x44;

    explicit CardMemory(uint32_t depth) : entries(4 * depth), completions(2 * depth) {
        for (Completion& completion : completions) completion.report(0, Completion::kNothingYet);
        card.entries = entries.data();
        card.doorbell = &doorbell;
        card.bell = &bell;
        card.completions = completions.data();
        card.last_entry = 4 * depth - 1;
        card.last_completion = 2 * depth - 1;
        card.completion_bits = static_cast<uint32_t>(std::countr_zero(2 * depth));
        card.number = kNumber;
        card.data = kData;
        card.flags = kFlags;
        card.source = kSource;
        card.scratch = {kScratch, 0x1000};
        queue.depth = depth;
        queue.producer = &producer;
        queue.card = &card;
    }
    CardMemory(const CardMemory&) = delete;

    // Of the bell as it was rung last: the number of the entry.
    uint16_t rung_with() const {
        return static_cast<uint16_t>(std::bit_cast<SendEntry::Begin>(bell).index_and_opcode >> 8);
    }
    void tell(uint64_t entry, uint64_t how) {
        completions[entry & card.last_completion].report(static_cast<uint16_t>(entry), how,
                                                         entry >> card.completion_bits);
    }

    std::vector<SendEntry> entries;
    std::vector<Completion> completions;
    uint64_t doorbell = 0, bell = 0;
    QueueProducer producer{};
    CardQueue card{};
    SendQueue queue{};
};

// Sees each bell when it rings.
struct BellWarp : HelpingWarp {
    CardMemory* memory = nullptr;
    uint64_t known = 0;  // entries that the card may take

    template <Scope scope>
    void publish(uint64_t* word, uint64_t value) {
        SpinningWarp::publish<scope>(word, value);
        if (word != &memory->bell) return;
        const SendQueue& queue = memory->queue;
        const uint16_t rung = memory->rung_with(), end = SendQueue::end_of(memory->doorbell);
        require(static_cast<uint16_t>(rung + 1) == end, "the bell rings before its record");
        require(value == memory->entries[rung & memory->card.last_entry].begin(),
                "the bell is not rung with its last entry");
        known += static_cast<uint16_t>(end - static_cast<uint16_t>(known));
        require(known <= memory->producer.posted + 1 && queue.place_of(known - 1).index() == rung,
                "the bell is rung for more than there is");
    }
};

// The same over a card's rings, some of whose completions are errors.
void check_card_wrap() {
    for (uint32_t depth = 2; depth <= 8; depth *= 2) {
        CardMemory memory(depth);
        const SendQueue& queue = memory.queue;
        uint64_t taken = 0;
        BellWarp warp;
        warp.memory = &memory;
        const auto take_one = [&] {
            const SendEntry& entry = memory.entries[taken & memory.card.last_entry];
            require(entry.index() == static_cast<uint16_t>(taken),
                    "an entry is not where its number says");
            require(uint32_t{entry.control.queue_and_size} >> 8 == CardMemory::kNumber,
                    "an entry is of another queue");
            const bool is_write = entry.opcode() == SendEntry::kWrite;
            require(entry.remote.key == (is_write ? CardMemory::kData : CardMemory::kFlags),
                    "an entry has another key");
            if (is_write)
                require(entry.write.source.key == CardMemory::kSource, "a write reads elsewhere");
            else
                require(entry.add.old_value.key == CardMemory::kScratch &&
                            entry.add.old_value.address == 0x1000,
                        "an addition leaves its value elsewhere");
            memory.tell(taken, taken % 7 ? Completion::kDone : Completion::kRequestError);
            ++taken;
        };
        bool was_full = false;
        warp.help = [&] {
            was_full = true;
            require(taken < warp.known, "a full queue was not rung");
            take_one();
            // Now and then up to the middle of the ring, as a card that holds back the other half.
            const uint64_t half = memory.producer.posted - depth / 2 + 1;
            while (memory.producer.posted % 5 == 0 && taken < half) take_one();
        };
        for (uint64_t i = 0; i < 70'000; ++i) {
            const bool is_write = i % 3 == 0;
            if (is_write) queue.post_write(warp, 1, 0, 0, 8);
            if (!is_write) queue.post_add(warp, 1, 0, 1);
            require(memory.producer.posted == i + 1 && memory.producer.posted - taken <= depth,
                    "more is posted than there is room for");
            require(is_write || warp.known == i + 1, "an addition did not ring");
            while (i % 11 == 0 && taken < warp.known) take_one();
        }
        require(was_full, "the queue was never full");
    }
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
            rank.nic->flush_reports();  // does not run yet
            int sockets[2];
            require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
            SoftwareNic::Links links(2);
            links[1] = std::make_unique<LateLink>(sockets[0], times);
            const auto& link = static_cast<const LateLink&>(*links[1]);
            rank.nic->start_over(std::move(links));
            std::this_thread::sleep_for(
                std::chrono::milliseconds(5));  // until it has a poll_interval
            const uint64_t word = ControlBlock::abort_word(outcome, 0);
            std::atomic_ref<uint64_t>(rank.controls[0].abort).store(word);
            rank.nic->flush_reports();
            require(link.has_arrived(), "what is on its way may be taken back");
            require(abort_word_in(sockets[1]) == (outcome == Outcome::CutOff ? 0 : word),
                    "the other machine knows less, or more");
            rank.nic->stop(std::chrono::seconds(0));
            close(sockets[1]);
        }
    }
}

// A rank whose network stops has told before how far it has come.
void check_goodbye() {
    TestRank a(0), b(1);
    const Wire wire(std::nullopt);
    a.nic->start({-1, wire.end(0)});
    b.nic->start({wire.end(1), -1});
    SpinningWarp warp;
    const auto set = [&](uint64_t call) {
        std::atomic_ref<uint64_t>(a.controls[0].finished.transfer).store(call);
    };
    const auto heard = [&] {
        return std::atomic_ref<uint64_t>(b.controls[0].finished.transfer).load();
    };
    set(1);
    require(warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{heard(), 1, 0}; }),
            "it tells nothing");
    require(b.nic->ranks_that_left().empty(), "it has not left");
    set(2);
    a.nic->stop(std::chrono::seconds(5));
    const auto left = [&](int) { return WaitCondition{b.nic->ranks_that_left().size(), 1, 0}; };
    require(warp.wait_all(Wait::None, 1, left), "no goodbye came");
    require(b.nic->ranks_that_left() == std::vector{0} && heard() == 2,
            "a goodbye came before what was to be said");
    require(b.controls[1].abort == 0 && b.lost(0).empty(), "a goodbye is taken for a loss");
    b.nic->stop(std::chrono::seconds(0));
}

void write_out(const void* data, size_t bytes) {
    require(std::fwrite(data, 1, bytes, stdout) == bytes, "no output");
}

// Writes to stdout what test_send_queue.py reads: the region of a rank, so many entries of a queue
// of it, the doorbell and the completion after them, and what they made of the region of the other
// rank.
void dump(uint64_t seed, int entries) {
    auto a = std::make_unique<TestRank>(0), b = std::make_unique<TestRank>(1);
    int sockets[2];
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
    std::mt19937_64 random(seed);
    for (char& byte : a->heap) byte = static_cast<char>(random());
    a->nic->start({-1, sockets[0]});
    b->nic->start({sockets[1], -1});
    write_out(a->heap.data(), a->heap.size());
    const auto queue = a->port->queues().puts(0, 1);
    SpinningWarp warp;
    for (int i = 0; i < entries; ++i) {
        const bool is_last = i == entries - 1;
        if (!is_last && random() % 3) {
            const auto bytes = static_cast<uint32_t>(random() % (random() % 8 ? 300 : 150'000));
            const uint64_t dst = kData + random() % (kHeapBytes - kData - bytes);
            require(queue.post_write(warp, 1, dst, random() % (kHeapBytes - bytes), bytes),
                    "no room");
        } else {
            const uint64_t flag = is_last ? 0 : 8 + 8 * (random() % 100);
            require(queue.post_add(warp, 1, flag, is_last ? 1 : random()), "no room");
        }
        write_out(&queue.entries[i & (queue.depth - 1)], sizeof(SendEntry));
    }
    require(warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{b->flag(0), 1, 0}; }),
            "not all was carried out");
    a->nic->stop(std::chrono::seconds(5));
    b->nic->stop(std::chrono::seconds(5));
    write_out(queue.doorbell, sizeof(DoorbellRecord));
    write_out(queue.completion, sizeof(Completion));
    write_out(b->heap.data(), b->heap.size());
}

// The same of a card's queue, of which nothing is carried out: the region of the rank, the entries,
// the doorbell and the bell after them, and what they shall make of a region of zeros.
void dump_card(uint64_t seed, int entries) {
    constexpr uint32_t kDepth = 8;
    CardMemory memory(kDepth);
    std::mt19937_64 random(seed);
    std::vector<char> own(kHeapBytes), other(kHeapBytes);
    for (char& byte : own) byte = static_cast<char>(random());
    write_out(own.data(), own.size());
    SpinningWarp warp;
    for (int i = 0; i < entries; ++i) {
        if (i < entries - 1 && random() % 3) {
            const size_t bytes = random() % 300,
                         dst = kData + random() % (kHeapBytes - kData - 300),
                         src = random() % (kHeapBytes - 300);
            require(memory.queue.post_write(warp, 1, dst, src, static_cast<uint32_t>(bytes)),
                    "no room");
            std::memcpy(&other[dst], &own[src], bytes);
        } else {
            const size_t flag = 8 * (random() % 100);
            const uint64_t increment = random();
            require(memory.queue.post_add(warp, 1, flag, increment), "no room");
            uint64_t word;
            std::memcpy(&word, &other[flag], sizeof word);
            word += increment;
            std::memcpy(&other[flag], &word, sizeof word);
        }
        const auto number = static_cast<uint64_t>(i);
        write_out(&memory.entries[number & memory.card.last_entry], sizeof(SendEntry));
        memory.tell(number, Completion::kDone);
    }
    write_out(&memory.doorbell, sizeof(DoorbellRecord));
    write_out(&memory.bell, sizeof memory.bell);
    write_out(other.data(), other.size());
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    if (argc == 4 && std::string(argv[1]) == "dump") {
        ep::dump(std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
        return 0;
    }
    if (argc == 4 && std::string(argv[1]) == "dump_card") {
        ep::dump_card(std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
        return 0;
    }
    ep::check_format();
    ep::check_completions();
    ep::check_wrap();
    ep::check_card_wrap();
    ep::check_garbage();
    ep::check_flush_reports();
    ep::check_goodbye();
    const bool is_all = argc == 2 && std::string(argv[1]) == "all";
    ep::run_rounds(is_all ? 70'000 : 1'500);
    for (uint64_t seed = 0; seed < (is_all ? 1'000 : 25); ++seed) ep::run_rounds(20, seed);
    std::puts("every signal came after its puts");
}
