// What other machines may say, made up: blocks of counts, headers of rows, choices, lines, and what
// ranks tell of themselves. Most is nearly right. Whatever comes, nothing is read or written
// outside of the tensors (AddressSanitizer looks on), and counts are taken if and only if ranks can
// have them.
//
//     malformed BLOCKS [FIRST_SEED]        so many of each kind
//     malformed seconds SECONDS            from a random seed on

#include <sanitizer/common_interface_defs.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fabric/queue/software_nic.h"
#include "fabric/queue/tcp_link.h"
#include "low_latency_programs.h"
#include "normal_programs.h"

namespace ep {
namespace {

uint64_t current_seed = 0;

void print_seed() { std::fprintf(stderr, "Again: malformed 500 %lu\n", current_seed); }

void require(bool ok, const char* what) {
    if (ok) return;
    std::fprintf(stderr, "%s\n", what);
    print_seed();
    std::_Exit(EXIT_FAILURE);
}

// Of a rank that is alone: what it would wait for does not come any more.
class NothingComes : public Executor {
  public:
    using Executor::wait;
    WaitEnd wait(Condition condition, const RankState&, uint64_t) override {
        return condition() ? WaitEnd::Met : WaitEnd::Expired;
    }
};

struct Random {
    std::mt19937_64 bits;
    int pick(int low, int high) { return low + static_cast<int>(bits() % (high - low + 1)); }
    bool once_in(int times) { return bits() % times == 0; }
    // A number that is seldom right where one in [0, most) is.
    int32_t wild(int most) {
        switch (pick(0, 5)) {
            case 0:
                return pick(0, most);
            case 1:
                return -1 - pick(0, 3);
            case 2:
                return std::numeric_limits<int32_t>::max() - pick(0, 3);
            case 3:
                return std::numeric_limits<int32_t>::min() + pick(0, 3);
            case 4:
                return 1 << pick(0, 30);
            default:
                return static_cast<int32_t>(bits());
        }
    }
};

// A rank of the normal mode, with the heaps of all.
class Transfers {
  public:
    explicit Transfers(uint64_t seed)
        : random_{std::mt19937_64(seed)},
          program_(any_heap()),
          rank_(random_.pick(0, topology_.world() - 1)) {
        std::vector<std::vector<int32_t>> ids(topology_.world());
        const int topk = format_.topk;
        for (int i = random_.pick(0, 5) * topk; i-- > 0;)
            ids[rank_].push_back(i % topk ? -1 : random_.pick(0, heap_.num_experts - 1));
        program_.add_handle({topk, random_.once_in(2), random_.once_in(3) ? 128 : 1}, ids);
        program_.add({NormalProgram::Kind::Dispatch, 0, DType::bf16, format_});
        notify_ = program_.handles[0].shares[rank_].notify;
        notify_.epoch = 2;  // even: its counts are in the first blocks
        dispatch_ = program_.parts[1][rank_].dispatch;
        HostWarp warp(executor_, state_, Role::Notify, 0);
        for (int channel = 0; channel < heap_.channels; ++channel)
            count_channel(warp, notify_, channel);
        for (int expert = 0; expert < heap_.num_experts; ++expert)
            sum_channels(warp, notify_, expert);
        for (int channel = 0; channel < heap_.channels; ++channel)
            index_channel(warp, notify_, channel);
        for (int group = 0; group < heap_.relays(); ++group) {
            for (int local = 0; local < topology_.ranks_per_node; ++local)
                *at<uint64_t>(rank_, heap_.notify_node_flag(local, group)) = notify_.epoch;
        }
        notify_.layout.totals().epoch = notify_.layout_epoch();
        tag_ = row_tag(dispatch_);
        for (int i = 0; i < 300; ++i) write_header();
    }

    // One set of blocks, and what is done by it.
    void run() {
        write_counts();
        HostWarp warp(executor_, state_, Role::Notify, 0);
        HostFabric fabric(topology_, rank_, program_.heaps);
        const bool taken = receive_counts(warp, fabric, notify_);
        require(taken == is_possible(),
                taken ? "impossible counts are taken" : "counts are refused");
        if (!taken) {
            require(state_.control->incidents[0].outcome == Outcome::Mismatch, "no mismatch");
            for (const int64_t rows : program_.handles[0].shares[rank_].counts)
                require(rows == -1, "refused counts are shown");
        } else {
            transfer(fabric);
        }
        for (ControlBlock* control : state_.everyone) {
            control->abort = 0;
            control->incident_count = 0;
        }
    }

  private:
    static constexpr int kMostRows = 300;

    template <class T>
    T* at(int rank, size_t offset) const {
        return reinterpret_cast<T*>(program_.heaps[rank] + offset);
    }
    int32_t* count_from(int rank) const { return at<int32_t>(rank_, heap_.notify_node(0, rank)); }
    int32_t* rail_count_from(int node) const {
        return at<int32_t>(rank_, heap_.notify_rail(0, node)) +
               topology_.ranks_per_node * heap_.rank_counts();
    }
    bool is_other_node(int node) const { return node != topology_.node_of(rank_); }

    void write_counts() {
        std::vector<int32_t*> written;
        for (int rank = 0; rank < topology_.world(); ++rank) {
            for (size_t i = 0; i < heap_.rank_counts(); ++i)
                written.push_back(count_from(rank) + i);
        }
        for (int node = 0; node < topology_.nodes && topology_.nodes > 1; ++node) {
            for (int channel = 0; channel < heap_.channels; ++channel)
                written.push_back(rail_count_from(node) + channel);
        }
        const int most = random_.once_in(2) ? 2 : random_.once_in(20) ? 1 << 30 : 9;
        for (int32_t* count : written) *count = random_.pick(0, most);
        auto any = [&]() -> int32_t& { return *written[random_.bits() % written.size()]; };
        switch (random_.pick(0, 3)) {
            case 0: {  // the sum stays what it was
                const int32_t moved = random_.once_in(2) ? 1'000'000 : 1;
                int32_t &more = any(), &less = any();
                more = sum_of(more, moved);
                less = difference_of(less, moved);
                break;
            }
            case 1:
                any() = random_.wild(most);
                break;
            default:
                break;
        }
    }

    bool is_possible() const {
        constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
        bool possible = true;
        int64_t arriving = 0, on_rail = 0, placed = 0;
        auto add = [&](int64_t& sum, int32_t count) {
            possible &= count >= 0;
            sum += count;
        };
        const int local_experts = heap_.local_experts();
        for (int expert = 0; expert < local_experts; ++expert) {
            int64_t rows = 0;
            for (int rank = 0; rank < topology_.world(); ++rank)
                add(rows, count_from(rank)[expert]);
            placed += static_cast<int64_t>(align_up(static_cast<size_t>(std::max<int64_t>(rows, 0)),
                                                    notify_.expert_alignment));
        }
        for (int rank = 0; rank < topology_.world(); ++rank) {
            for (int channel = 0; channel < heap_.channels; ++channel)
                add(arriving, count_from(rank)[local_experts + channel]);
        }
        for (int node = 0; node < topology_.nodes; ++node) {
            for (int channel = 0; channel < heap_.channels && is_other_node(node); ++channel)
                add(on_rail, rail_count_from(node)[channel]);
        }
        return possible && arriving <= kMost && on_rail <= kMost && placed <= kMost;
    }

    void write_header() {
        const int channel = random_.pick(0, heap_.channels - 1);
        const int node = random_.pick(0, topology_.nodes - 1);
        const int slot = random_.pick(0, 3);
        const bool network = is_other_node(node) && random_.once_in(2);
        const size_t ring =
            network ? heap_.rdma_data(channel, node, topology_.node_of(rank_))
                    : heap_.nvl_data(channel, node, random_.pick(0, topology_.ranks_per_node - 1));
        char* row = at<char>(rank_, ring + slot * format_.slot_bytes());
        auto* stamp = reinterpret_cast<RowFormat::Stamp*>(row + format_.tag());
        *stamp = {random_.once_in(50) ? random_.bits() : tag_, random_.bits()};
        auto* experts = reinterpret_cast<int32_t*>(row + format_.experts());
        auto* index = reinterpret_cast<int32_t*>(row + format_.index());
        for (int k = 0; k < format_.topk; ++k) {
            experts[k] = random_.once_in(10) ? random_.wild(heap_.num_experts)
                                             : random_.pick(-1, heap_.num_experts - 1);
            index[k] = random_.once_in(10) ? random_.wild(9) : random_.pick(0, 9);
        }
    }

    // As many rows are said to be there as a ring holds, or a few more.
    void write_flags() {
        for (int channel = 0; channel < heap_.channels; ++channel) {
            for (int node = 0; node < topology_.nodes; ++node) {
                for (int peer = 0; peer < topology_.ranks_per_node; ++peer) {
                    auto* in = at<InCursor>(rank_, heap_.nvl_in(channel, node, peer));
                    *at<uint64_t>(rank_, heap_.nvl_tail(channel, node, peer)) =
                        in->next + random_.pick(0, 6);
                    auto* out = at<OutCursor>(rank_, heap_.nvl_out(channel, node, peer));
                    *at<uint64_t>(rank_, heap_.nvl_head(channel, node, peer)) = out->next;
                }
                if (!is_other_node(node)) continue;
                auto* in = at<InCursor>(rank_, heap_.rdma_in(channel, node));
                *at<uint64_t>(rank_, heap_.rdma_tail(channel, node)) =
                    in->next + random_.pick(0, 6);
            }
        }
    }

    void transfer(HostFabric& fabric) {
        for (int i = random_.pick(0, 4); i > 0; --i) write_header();
        write_flags();
        // Exactly as large as they have to be, or too small: then rows are left out.
        const Layout::Totals& totals = dispatch_.layout.totals();
        auto room = [&](int rows) {
            return std::min(random_.once_in(4) ? random_.pick(0, 20) : rows, kMostRows);
        };
        const int rows = room(dispatch_.is_flat ? totals.received_rows : totals.expert_rows);
        const int received = dispatch_.is_flat ? rows : room(totals.received_rows);
        const int rail = room(totals.rail_rows), topk = format_.topk;
        std::vector<int32_t> dst_rows(static_cast<size_t>(received) * topk, -1),
            source_tokens(received), rail_experts(static_cast<size_t>(rail) * topk, -1);
        std::vector<char> x(static_cast<size_t>(rows) * format_.payload_bytes),
            scales(static_cast<size_t>(rows) * format_.scale_bytes),
            weights(static_cast<size_t>(rows) * format_.weight_bytes *
                    (dispatch_.is_flat ? topk : 1));
        DispatchArgs args = dispatch_;
        args.dst_rows = dst_rows.data();
        args.rail_experts = rail_experts.data();
        args.max_received = received;
        args.max_rail = rail;
        args.max_rows = rows;
        args.recv_x = x.data();
        args.recv_scales = scales.data();
        args.recv_weights = weights.data();
        args.source_tokens = source_tokens.data();
        args.has_intra_rank_pass = random_.once_in(2);
        for (int channel = 0; channel < heap_.channels; ++channel) {
            HostWarp warp(executor_, state_, Role::Receiver, channel);
            receiver(warp, fabric, args, channel, 0, args.other_ranks());
            if (topology_.nodes > 1) forwarder(warp, fabric, args, channel, 0, args.other_nodes());
        }
        HostWarp warp(executor_, state_, Role::Launch, 0);
        clear_unfilled(warp, args, 0, 1);
        if (args.has_intra_rank_pass && !args.is_flat) copy_to_other_output_rows(warp, args, 0, 1);
        CombineArgs combine{};
        static_cast<TransferArgs&>(combine) = args;
        combine.is_combine = true;
        combine.x = x.data();
        combine.weights = weights.data();
        write_flags();
        for (int channel = 0; channel < heap_.channels; ++channel)
            combine_nvl_sender<float, false>(warp, fabric, combine, channel, 0, args.other_ranks());
    }

    Heap any_heap() {
        const Topology topology{random_.pick(1, 3), random_.pick(1, 4)};
        const size_t ring = align_up(format_.slot_bytes() * 4, Heap::kLine);
        return {topology, topology.world() * random_.pick(1, 3), random_.pick(1, 3), ring, ring};
    }

    Random random_;
    RowFormat format_{4 * random_.pick(1, 4), random_.pick(0, 1) * 8, 4, random_.pick(1, 4), 0};
    NormalProgram program_;
    const Heap& heap_ = program_.heap;
    const Topology& topology_ = program_.topology;
    int rank_;
    RankState& state_ = program_.states[rank_];
    NothingComes executor_;
    NotifyArgs notify_{};
    DispatchArgs dispatch_{};
    uint64_t tag_ = 0;
};

// The first dispatch of a low-latency program, as all ranks have sent it, before it is received.
class LowLatency {
  public:
    LowLatency(uint64_t seed, bool lines)
        : random_{std::mt19937_64(~seed)},
          program_(seed, nullptr, 2, LowLatencyProgram::Sizes::OfWarps, false, lines),
          lines_(lines),
          rank_(random_.pick(0, program_.topology.world() - 1)) {
        for (int rank = 0; rank < program_.topology.world(); ++rank) run_half(rank, true);
        const char* heap = program_.heaps[rank_];
        sent_.assign(heap, heap + program_.heap.bytes());
    }

    void run() {
        LowLatencyProgram& program = program_;
        char* heap = program.heaps[rank_];
        std::memcpy(heap, sent_.data(), sent_.size());
        program.controls[rank_].abort = program.controls[rank_].incident_count = 0;
        const LowLatencyHeap& layout = program.heap;
        const int bank = 1 % LowLatencyHeap::kBanks;
        for (int i = random_.pick(1, 3); i > 0; --i) {
            const int source = random_.pick(0, program.topology.world() - 1);
            const size_t choices = layout.choices(bank, source);
            const bool row = random_.once_in(8);
            const size_t first = row ? layout.row(bank, source, 0) : choices;
            const size_t end =
                row ? layout.row(bank, source, layout.max_tokens) : choices + layout.choice_bytes();
            const size_t word = first + random_.bits() % (end - first) / 8 * 8;
            auto* half = reinterpret_cast<int32_t*>(heap + word);
            if (!lines_ && random_.once_in(2)) ++half;  // in lines it is the number of the call
            switch (random_.pick(0, 2)) {
                case 0:
                    *half = random_.wild(layout.max_tokens);
                    break;
                case 1:
                    *half ^= 1 << random_.pick(0, 31);
                    break;
                default:
                    *half = sum_of(*half, random_.pick(-2, 2));
            }
        }
        run_half(rank_, false);
    }

  private:
    void run_half(int rank, bool sends) {
        for (int number = 0; number < program_.warps; ++number) {
            HostWarp warp(executor_, program_.states[rank], Role::LowLatencyReceiver, number);
            const LowLatencyProgram::Half half{0, sends, !sends};
            program_.run_half(warp, program_.fabrics[rank], rank, half,
                              Team{number, program_.warps});
        }
    }

    Random random_;
    LowLatencyProgram program_;
    bool lines_;
    int rank_;
    NothingComes executor_;
    std::vector<char> sent_;
};

// What a connection brings to the thread of a rank's network: `frames` of them, or until it ends.
void run_frames(Random& random, int frames) {
    constexpr size_t kHeap = 4096;
    std::vector<char> heap(kHeap);
    std::vector<ControlBlock> controls(2);
    SoftwareNic nic(0, {&controls[0], &controls[1]});
    const auto port = nic.open({heap.data(), nullptr}, kHeap, 1);
    int sockets[2];
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
    SoftwareNic::Links links(2);
    links[1] = std::make_unique<TcpLink>(sockets[0]);
    nic.start_stepped(std::move(links));
    std::vector<char> body(70 << 10);
    for (int i = 0; i < frames; ++i) {
        Frame frame{static_cast<uint8_t>(random.pick(1, 4))};
        frame.increment =
            ControlBlock::abort_word(static_cast<Outcome>(random.pick(0, 12)), random.pick(0, 2));
        if (frame.kind == Frame::kWrite) frame.bytes = random.pick(0, 64);
        if (frame.kind == Frame::kStatus) frame.bytes = sizeof(ControlBlock);
        frame.address = 8 * random.pick(0, kHeap / 8);
        if (random.once_in(8)) {
            const size_t byte = random.bits() % sizeof frame;
            reinterpret_cast<char*>(&frame)[byte] = static_cast<char>(random.bits());
        }
        const size_t size = std::min<size_t>(frame.bytes, body.size());
        for (size_t at = 0; at + 8 <= size; at += 8) {
            const uint64_t word = random.once_in(2) ? random.bits() : 0;
            std::memcpy(&body[at], &word, sizeof word);
        }
        if (write(sockets[1], &frame, sizeof frame) < 0 || write(sockets[1], body.data(), size) < 0)
            break;
        nic.step();
        require(controls[1].reason.bytes <= Reason::kMaxBytes, "a reason is too long");
        const Outcome outcome = ControlBlock::outcome_of(controls[0].abort);
        require(outcome != Outcome::Aborted && outcome != Outcome::CutOff &&
                    (outcome != Outcome::Ok || !controls[0].abort),
                "an outcome that nobody sends is taken");
        if (controls[0].abort) break;
    }
    nic.close(port);
    nic.stop(std::chrono::seconds(0));
    close(sockets[1]);
}

// Returns how many.
uint64_t run(uint64_t seed, uint64_t most) {
    constexpr uint64_t kOfProgram = 500;
    const uint64_t blocks = std::min(most, kOfProgram);
    current_seed = seed;
    Transfers transfers(seed);
    LowLatency slots(seed, false), lines(seed, true);
    Random random{std::mt19937_64(seed)};
    for (uint64_t i = 0; i < blocks; ++i) {
        transfers.run();
        slots.run();
        lines.run();
        if (i % 20 == 0) run_frames(random, 20);
    }
    return blocks;
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    using Clock = std::chrono::steady_clock;
    __sanitizer_set_death_callback(ep::print_seed);
    const bool timed = argc == 3 && argv[1] == std::string("seconds");
    if (argc != 2 && argc != 3) return 2;
    const uint64_t number = std::strtoull(argv[timed ? 2 : 1], nullptr, 10);
    const auto end = Clock::now() + std::chrono::seconds(number);
    uint64_t done = 0, seed = timed      ? std::random_device()() * 1'000'000ull
                              : argc > 2 ? std::strtoull(argv[2], nullptr, 10)
                                         : 0;
    std::printf("from seed %lu on\n", seed);
    std::fflush(stdout);
    for (; timed ? Clock::now() < end : done < number; ++seed)
        done += ep::run(seed, timed ? ~uint64_t{0} : number - done);
    std::printf("%lu blocks of each kind, none did harm\n", done);
}
