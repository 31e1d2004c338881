// What each role does for a row, as the number of nodes grows: steps of its warps, and how often
// they look at what they wait for. Prints a table, and fails where a figure leaves its budget.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "normal_programs.h"

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

constexpr int kRanks = 2, kTokens = 48, kTopk = 4, kChannels = 2;

// One dispatch and its combine between random tokens and experts, one expert a rank. Returns how
// many rows arrive anywhere: a token at a rank.
uint64_t run(int nodes) {
    const int world = nodes * kRanks;
    const RowFormat format{32, 0, 4, kTopk};
    NormalProgram program(
        Heap{{nodes, kRanks}, world, kChannels, 4 * format.slot_bytes(), 8 * format.slot_bytes()});
    std::mt19937 random(nodes);
    uint64_t rows = 0;
    std::vector<std::vector<int32_t>> ids(world);
    for (std::vector<int32_t>& own : ids) {
        for (int token = 0; token < kTokens; ++token) {
            std::set<int> experts;
            while (static_cast<int>(experts.size()) < std::min(kTopk, world))
                experts.insert(static_cast<int>(random() % world));
            own.insert(own.end(), experts.begin(), experts.end());
            own.resize((token + 1) * kTopk, -1);
            rows += experts.size();
        }
    }
    program.add_handle({kTopk}, ids);
    for (const auto kind : {NormalProgram::Kind::Dispatch, NormalProgram::Kind::Combine}) {
        program.add({kind, 0, DType::bf16, format});
        for (NormalProgram::Part& part : program.parts.back()) {
            part.dispatch.has_intra_rank_pass = false;
            part.combine.sums = nullptr;
            part.dispatch.nvl_batch = part.combine.nvl_batch = 2;
            part.dispatch.rdma_chunk = part.combine.rdma_chunk = 4;
            part.receivers = 1;
        }
    }
    const auto tasks = program.tasks<CountingWarp, HostFabric>();
    FiberExecutor().run(tasks);
    if (!program.aborted() && !program.errors(tasks)) return rows;
    std::fprintf(stderr, "%d nodes: a wrong value\n", nodes);
    std::exit(EXIT_FAILURE);
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
