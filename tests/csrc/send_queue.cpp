// The format of entries, byte by byte; two ranks over a socket; and what a rank does about bytes
// that no rank sends.

#include "send_queue.h"

#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <random>

#include "fabric/queue/tcp_link.h"
#include "fabric/queue/unordered_link.h"

#if __has_include(<infiniband/mlx5dv.h>)
#include <infiniband/mlx5dv.h>
static_assert(sizeof(ep::SendEntry::Control) == sizeof(mlx5_wqe_ctrl_seg));
static_assert(sizeof(ep::SendEntry::Remote) == sizeof(mlx5_wqe_raddr_seg));
static_assert(sizeof(ep::SendEntry::Local) == sizeof(mlx5_wqe_data_seg));
static_assert(sizeof(ep::SendEntry::Atomic) == sizeof(mlx5_wqe_atomic_seg));
static_assert(ep::SendEntry::kWrite == MLX5_OPCODE_RDMA_WRITE);
static_assert(ep::SendEntry::kFetchAdd == MLX5_OPCODE_ATOMIC_FA);
static_assert(ep::SendEntry::kTellCompletion == MLX5_WQE_CTRL_CQ_UPDATE);
static_assert(sizeof(ep::Completion) == sizeof(mlx5_cqe64));
static_assert(offsetof(ep::Completion, entry) == offsetof(mlx5_cqe64, wqe_counter));
static_assert(offsetof(ep::Completion, kind) == offsetof(mlx5_cqe64, op_own));
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
    expect_bytes(SendEntry::write_of(0xabcd, 0x123456, 7, 0x1122334455667788, 0x99aa, 0x10000),
                 "00abcd08"
                 "12345603"
                 "00000008"
                 "00000000"
                 "1122334455667788"
                 "00000007"
                 "00000000"
                 "00010000"
                 "00000007"
                 "00000000000099aa"
                 "00000000000000000000000000000000");
    expect_bytes(SendEntry::add_of(1, 2, 3, 0x40, 0x0102030405060708, 8),
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
                 "00000003"
                 "0000000000000008");
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
        const SendQueue queue{entries.data(), depth,       1,         0,      0,
                              &doorbell,      &completion, &producer, nullptr};
        queue.clear();
        uint64_t taken = 0;
        const auto take_one = [&] {
            require(queue.entries[taken & (depth - 1)].index() == static_cast<uint16_t>(taken),
                    "an entry is not where its number says");
            completion.tell(static_cast<uint16_t>(taken++), Completion::kDone);
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

// What ends a connection, and all waits of the rank with it.
void check_garbage() {
    constexpr uint16_t kQueues = 2 * (kChannels + 1);  // towards a rank
    std::vector<Frame> frames = {
        {99, 0, 0, 0, 0, 0},                            // no kind of frame
        {Frame::kWrite, 9, 0, 8, 0, 0},                 // no such region
        {Frame::kWrite, 0, 0, 8, kHeapBytes, 0},        // behind its end
        {Frame::kWrite, 0, 0, 8, ~uint64_t{0} - 3, 0},  // so far that a sum overflows
        {Frame::kWrite, 0, 0, 1 << 30, 0, 0},           // more than any rank puts at once
        {Frame::kAdd, 0, 0, 0, 4, 1},                   // not aligned
        {Frame::kAdd, 0, 0, 8, 0, 1},                   // with bytes behind it
        {Frame::kWrite, 0, kQueues, 8, 0, 0},           // of a queue that there is not
        {Frame::kAdd, 0, kQueues, 0, 0, 1},
        {Frame::kAbort, 0, 0, 0, 0, 99},                                            // no outcome
        {Frame::kAbort, 0, 0, 0, 0, ControlBlock::abort_word(Outcome::Failed, 2)},  // of nobody
        {Frame::kStatus, 0, 0, 7, 0, 0},  // not of a status's size
    };
    for (const std::optional<uint64_t> unordered :
         {std::optional<uint64_t>(), std::optional(1ul)}) {
        for (const Frame& frame : frames) {
            TestRank rank(0, nullptr, unordered);
            require_refused(rank, frame);
            for (const char byte : rank.heap) require(byte == 0, "garbage was written");
        }
    }
}

// Garbage on one connection of several, and an end of one, are the end of the rank.
void check_striped_garbage() {
    const Frame status{Frame::kStatus, 0, 0, sizeof(ControlBlock), 0, 0};  // of the first one alone
    const Frame news{Frame::kAbort, 0, 0, 0, 0, ControlBlock::abort_word(Outcome::Failed, 1)};
    for (const Frame* frame : {&status, &news, static_cast<const Frame*>(nullptr)}) {
        TestRank rank(0);
        int first[2], second[2];
        require(socketpair(AF_UNIX, SOCK_STREAM, 0, first) == 0 &&
                    socketpair(AF_UNIX, SOCK_STREAM, 0, second) == 0,
                "no sockets");
        rank.nic->start({{}, {first[0], second[0]}});
        if (frame)
            require(write(second[1], frame, sizeof *frame) == sizeof *frame, "no write");
        else
            close(second[1]);
        SpinningWarp warp;
        wait_until_lost(warp, rank, "one connection was enough");
        const SendQueue over_first = rank.port->queues().puts(0, 1);
        require(over_first.post_add(warp, 1, 0, 1), "no room");
        rank.nic->wake();
        require(warp.wait_all(Wait::None, 1,
                              [&](int) {
                                  const uint64_t how = SpinningWarp::acquire<Scope::System>(
                                                           over_first.completion->last_word()) >>
                                                       60;
                                  return WaitCondition{how == Completion::kRequestError, 1, 1};
                              }),
                "the other connection was used on");
        rank.nic->stop(std::chrono::seconds(0));
        require(
            rank.lost(1) == (frame ? "it sent what no rank sends" : "the connection was closed"),
            rank.lost(1));
        close(first[1]);
        if (frame) close(second[1]);
    }
}

// Whether a flag was seen before the rows that were put before it, over a network that keeps no
// order: of its word, if it says so, or none.
template <class AnyLink>
bool overtakes(uint64_t seed) {
    constexpr int kPuts = 20;
    TestRank a(0), b(1);
    int sockets[2];
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
    const auto links_of = [&](int side) {
        std::vector<SoftwareNic::Links> links(2);
        links[1 - side].push_back(std::make_unique<AnyLink>(
            std::make_unique<TcpLink>(sockets[side]), seed + static_cast<uint64_t>(side)));
        return links;
    };
    a.nic->start_over(links_of(0));
    b.nic->start_over(links_of(1));
    std::fill(a.heap.begin() + kData, a.heap.end(), 1);
    SpinningWarp warp;
    const SendQueue queue = a.port->queues().puts(0, 1);
    for (int i = 0; i < kPuts; ++i)
        require(queue.post_write(warp, 1, kData + i, kData + i, 1), "no room");
    require(queue.post_add(warp, 1, 0, 1), "no room");
    require(warp.wait_all(Wait::None, 1, [&](int) { return WaitCondition{b.flag(0), 1, 0}; }),
            "no flag came");
    bool missing = false;
    for (int i = 0; i < kPuts; ++i)
        missing |= std::atomic_ref<char>(b.heap[kData + i]).load(std::memory_order_relaxed) == 0;
    std::jthread other([&] { a.nic->stop(std::chrono::seconds(5)); });
    b.nic->stop(std::chrono::seconds(5));
    return missing;
}

struct SaysOrdered : UnorderedLink {
    using UnorderedLink::UnorderedLink;
    bool keeps_order() const override { return true; }
};

void check_unordered() {
    int overtaken = 0;
    for (uint64_t seed = 0; seed < 20; ++seed) {
        require(!overtakes<UnorderedLink>(seed), "a flag came before its rows");
        overtaken += overtakes<SaysOrdered>(seed);
    }
    require(overtaken > 0, "this network keeps an order");
}

// Additions in turn, each when its batch is there; and what no rank sends.
void check_held_additions() {
    const auto write_in = [](uint32_t batch, uint16_t queue = 0) {
        return Frame{Frame::kWrite, 0, queue, 8, 0, 0, batch};
    };
    const auto addition = [](uint32_t batch, uint32_t writes, uint16_t queue = 0) {
        return Frame{Frame::kAdd, 0, queue, 0, 0, 0, batch, writes};
    };
    std::mt19937_64 random(7);
    for (int round = 0; round < 200; ++round) {
        std::vector<Frame> frames;
        const uint32_t batches = 1 + random() % 20;
        for (uint32_t batch = 0; batch < batches; ++batch) {
            const uint32_t writes = random() % 4;
            for (uint32_t i = 0; i < writes; ++i) frames.push_back(write_in(batch));
            frames.push_back(addition(batch, writes));
        }
        std::shuffle(frames.begin(), frames.end(), random);
        HeldAdditions held;
        std::vector<uint32_t> arrived(batches);
        uint32_t next = 0;
        for (const Frame& frame : frames) {
            arrived[frame.batch] += frame.kind == Frame::kWrite;
            require(held.take(frame,
                              [&](const Frame& now) {
                                  require(now.batch == next++ && arrived[now.batch] == now.writes,
                                          "an addition is not in turn, or early");
                              }),
                    "what ranks send is refused");
        }
        require(next == batches, "an addition was held back for ever");
    }
    const auto is_refused = [](const std::vector<Frame>& frames) {
        HeldAdditions held;
        bool is_taken = true;
        for (const Frame& frame : frames) {
            require(is_taken, "it was refused too early");
            is_taken = held.take(frame, [](const Frame&) {});
        }
        return !is_taken;
    };
    require(is_refused({addition(1, 0), addition(1, 0)}), "an addition came twice");
    require(is_refused({addition(0, 0), addition(0, 0)}), "an addition came again");
    require(is_refused({addition(0, 0), write_in(0)}), "a write came after its batch");
    require(is_refused({write_in(1), write_in(1), addition(1, 1)}), "more than there are");
    require(is_refused({write_in(1 << 12)}), "a batch that is far ahead");
    require(!is_refused({addition(0, 0), addition(0, 0, 1)}), "queues are one");
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
    a->nic->start({{}, {sockets[0]}});
    b->nic->start({{sockets[1]}, {}});
    write_out(a->heap.data(), a->heap.size());
    const SendQueue queue = a->port->queues().puts(0, 1);
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

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    if (argc == 4 && std::string(argv[1]) == "dump") {
        ep::dump(std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
        return 0;
    }
    ep::check_format();
    ep::check_wrap();
    ep::check_garbage();
    ep::check_striped_garbage();
    ep::check_held_additions();
    ep::check_unordered();
    ep::run_rounds(70'000);
    for (uint64_t seed = 0; seed < 1'000; ++seed)
        ep::run_rounds(20, seed, 1 + static_cast<int>(seed % 4));
    for (uint64_t seed = 0; seed < 500; ++seed)
        ep::run_rounds(20, seed % 2 ? std::optional(seed) : std::nullopt,
                       1 + static_cast<int>(seed % 4), {}, seed);
    std::puts("every signal came after its puts");
}
