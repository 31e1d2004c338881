// What each role does for a row, as the number of nodes grows: steps of its warps, and how often
// they look at what they wait for. Prints a table, and fails where a figure leaves its budget.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "fabric/shared_memory.h"
#include "launch/host/group.h"
#include "launch/host/group.inl"

namespace ep {
namespace {

constexpr int kRoles = static_cast<int>(kLastOfTransfers) + 1;

struct Work {
    uint64_t steps = 0, polls = 0;
};
Work work[kRoles];

// A function of a warp, with its template parameters that are no types, which counts as a step.
#define EP_COUNTED(name)                                                    \
    template <auto... kParameters, class... Args>                           \
    auto name(Args&&... args) {                                             \
        ++work_.steps;                                                      \
        return HostWarp::name<kParameters...>(std::forward<Args>(args)...); \
    }

// A warp that counts what it is told to do; to read a register of another lane counts nothing.
class CountingWarp : public HostWarp {
  public:
    CountingWarp(Executor& executor, const RankState& rank, Role role, int channel)
        : HostWarp(executor, rank, role, channel), work_(work[static_cast<int>(role)]) {}

    EP_COUNTED(lanes)
    EP_COUNTED(ballot)
    EP_COUNTED(copy)
    EP_COUNTED(multicast)
    EP_COUNTED(publish)
    EP_COUNTED(publish_lanes)
    EP_COUNTED(credit)
    EP_COUNTED(credit_lanes)

    uint32_t first_of(int count, const PerLane<int>& keys) {
        ++work_.steps;
        return HostWarp::first_of(count, keys);
    }
    uint32_t last_of(int count, const PerLane<int>& keys) {
        ++work_.steps;
        return HostWarp::last_of(count, keys);
    }
    template <class F>
    bool met(int count, F&& need) {
        ++work_.steps;
        return HostWarp::met(count, counted(need));
    }
    template <class F>
    bool wait_all(Wait wait, int count, F&& need) {
        ++work_.steps;
        return HostWarp::wait_all(wait, count, counted(need));
    }
    template <class F>
    uint32_t wait_any(Wait wait, int count, F&& need) {
        ++work_.steps;
        return HostWarp::wait_any(wait, count, counted(need));
    }
    template <class T, CacheHint hint, class Weights>
    void sum(void* dst, const PerLane<const void*>& srcs, const Weights& weights, uint32_t mask,
             size_t count) {
        ++work_.steps;
        HostWarp::sum<T, hint>(dst, srcs, weights, mask, count);
    }

  private:
    // Every look asks lane 0.
    template <class F>
    auto counted(F& need) {
        return [this, &need](int lane) {
            work_.polls += lane == 0;
            return need(lane);
        };
    }

    Work& work_;
};

constexpr int kRanks = 2, kTokens = 48, kTopk = 4, kChannels = 2, kHidden = 8;

struct Share {
    std::vector<int32_t> ids, layout, dst_rows, rail;
    std::vector<int64_t> counts;
    std::vector<float> x, weights, rows, row_weights, y, y_weights;
};

// Returns how many experts its tokens choose in all.
uint64_t choose_experts(Share& share, std::mt19937& random, int world) {
    uint64_t rows = 0;
    for (int token = 0; token < kTokens; ++token) {
        std::set<int> experts;
        while (static_cast<int>(experts.size()) < std::min(kTopk, world))
            experts.insert(static_cast<int>(random() % world));
        std::vector<int32_t> ids(experts.begin(), experts.end());
        ids.resize(kTopk, -1);
        share.ids.insert(share.ids.end(), ids.begin(), ids.end());
        rows += experts.size();
    }
    return rows;
}

// Of a rank, behind its notify.
std::pair<DispatchArgs, CombineArgs> calls_of(Share& share, const NotifyArgs& notify,
                                              const RowFormat& format) {
    const Layout::Totals& totals = notify.layout.totals();
    share.dst_rows.resize(totals.received_rows * kTopk);
    share.rail.resize(totals.rail_rows * kTopk + 1);
    share.x.assign(kTokens * kHidden, static_cast<float>(notify.rank));
    share.weights.resize(kTokens * kTopk);
    share.rows.resize(totals.expert_rows * kHidden);
    share.row_weights.resize(totals.expert_rows);
    share.y.resize(share.x.size());
    share.y_weights.resize(share.weights.size());
    const TransferArgs args{notify.rank,
                            notify.heap,
                            notify.layout,
                            format,
                            1,
                            2,
                            4,
                            share.dst_rows.data(),
                            share.rail.data(),
                            totals.received_rows,
                            totals.rail_rows,
                            totals.expert_rows};
    auto bytes = [](std::vector<float>& of) { return reinterpret_cast<char*>(of.data()); };
    DispatchArgs dispatch{
        args,    bytes(share.x),          nullptr, bytes(share.weights), bytes(share.rows),
        nullptr, bytes(share.row_weights)};
    dispatch.fills_tables = true;
    CombineArgs combine{args, bytes(share.rows), bytes(share.row_weights), bytes(share.y),
                        bytes(share.y_weights)};
    combine.call = 2;
    combine.is_combine = true;
    return {dispatch, combine};
}

// One dispatch and its combine between random tokens and experts, one expert a rank. Returns how
// many rows arrive anywhere: a token at a rank.
uint64_t run(int nodes) {
    const Topology topology{nodes, kRanks};
    const int world = topology.world();
    const RowFormat format{kHidden * 4, 0, 4, kTopk};
    const Heap heap{topology, world, kChannels, 4 * format.slot_bytes(), 8 * format.slot_bytes()};
    std::vector<Segment> memory;
    std::vector<char*> heaps;
    std::vector<int> ranks;
    for (int rank = 0; rank < world; ++rank) {
        memory.push_back(Segment::anonymous(heap.bytes()));
        heaps.push_back(memory.back().data());
        ranks.push_back(rank);
    }
    HostGroup group(heap, ranks, heaps, {}, std::chrono::seconds(60));

    std::mt19937 random(nodes);
    std::vector<Share> shares(world);
    std::vector<NotifyArgs> notify;
    uint64_t rows = 0;
    for (int rank = 0; rank < world; ++rank) {
        Share& share = shares[rank];
        rows += choose_experts(share, random, world);
        Layout layout{topology, kTokens, kTopk, world, kChannels, nullptr};
        share.layout.resize(layout.size());
        layout.data = share.layout.data();
        share.counts.resize(1);
        notify.push_back({{share.ids.data(), 4, 1, 0, share.counts.data()}, rank, heap, layout, 1});
    }
    group.notify<CountingWarp>(notify);

    std::vector<DispatchArgs> dispatch;
    std::vector<CombineArgs> combine;
    for (int rank = 0; rank < world; ++rank) {
        auto [first, second] = calls_of(shares[rank], notify[rank], format);
        dispatch.push_back(first);
        combine.push_back(second);
    }
    group.dispatch<CountingWarp>(dispatch);
    group.combine<CountingWarp>(combine, DType::fp32);
    for (int rank = 0; rank < world; ++rank) {
        for (const float y : shares[rank].y) {
            if (group.finished() && y == static_cast<float>(rank * std::min(kTopk, world)))
                continue;
            std::fprintf(stderr, "%d nodes: a wrong sum\n", nodes);
            std::exit(EXIT_FAILURE);
        }
    }
    return rows;
}

// For a row that arrives at a rank, with any number of nodes.
struct Budget {
    Role role;
    const char* name;
    double steps, polls;
};
constexpr Budget kBudgets[] = {
    {Role::NvlSender, "nvl_sender", 3.7, 0.6},
    {Role::RdmaSender, "rdma_sender", 5.5, 0.7},
    {Role::SenderCoordinator, "sender_coordinator", 2.8, 0.4},
    {Role::Forwarder, "forwarder", 13, 1.3},
    {Role::ForwarderCoordinator, "forwarder_coordinator", 1.6, 0.4},
    {Role::Receiver, "receiver", 9.5, 0.4},
    {Role::CombineNvlSender, "combine_nvl_sender", 9.5, 0.4},
    {Role::CombineForwarder, "combine_forwarder", 14, 2.6},
    {Role::CombineReceiver, "combine_receiver", 4.4, 0.6},
};

}  // namespace
}  // namespace ep

int main() {
    using namespace ep;
    bool within = true;
    std::printf("steps + polls a row, by nodes of %d ranks\n%-22s", kRanks, "");
    const int nodes[] = {2, 4, 8, 16, 32, 64};
    std::vector<std::vector<Work>> all;
    std::vector<double> rows;
    for (const int count : nodes) {
        std::printf(" %13d", count);
        std::fill(std::begin(work), std::end(work), Work{});
        rows.push_back(static_cast<double>(run(count)));
        all.emplace_back(std::begin(work), std::end(work));
    }
    std::printf(" %13s\n", "budget");
    for (const Budget& budget : kBudgets) {
        std::printf("%-22s", budget.name);
        for (size_t i = 0; i < rows.size(); ++i) {
            const Work& one = all[i][static_cast<int>(budget.role)];
            const double steps = static_cast<double>(one.steps) / rows[i],
                         polls = static_cast<double>(one.polls) / rows[i];
            const bool is_more = steps > budget.steps || polls > budget.polls;
            std::printf(" %5.1f + %4.1f%c", steps, polls, is_more ? '!' : ' ');
            within = within && !is_more;
        }
        std::printf(" %5.1f + %4.1f\n", budget.steps, budget.polls);
    }
    return within ? EXIT_SUCCESS : EXIT_FAILURE;
}
