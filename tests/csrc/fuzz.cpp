// Random clusters and programs of both modes under the seeded scheduler. Between nodes lies a
// network that delays and reorders, or send queues that software network cards carry out. In some
// of them something fails: then no call that a rank finished is wrong, the report leads to the rank
// that stalled, and after a reset all is right.
//
//     fuzz [MODE] FIRST_SEED END_SEED
//     fuzz seconds SECONDS [FIRST_SEED]     on all cores, from a random seed on
//
// Modes: low_latency   halves of low-latency calls, replayed over the same arguments, nothing fails
//        masks         the same with masking: one rank may stop for good or for a while, callers
//                      mask others
//        three         three low-latency calls of a kind under way, which must be seen to go wrong
//        without_credits   programs of the normal mode in which nobody gives credit: those that
//                          need some must be seen to fail

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>

#include "exec/host/fibers.h"
#include "faulty_warp.h"
#include "masked_programs.h"
#include "normal_programs.h"
#include "software_network.h"

namespace ep {
namespace {

// What goes wrong. From a rank's n-th wait on it never goes on, or it gives up; or the network
// loses its n-th signal, or after n steps a connection.
struct Fault {
    enum class Kind { None, Stall, Abort, Loss } kind = Kind::None;
    int rank = 0;
    uint64_t after = 0;

    uint64_t loss() const { return kind == Kind::Loss ? after : 0; }
};

class FaultyExecutor : public SeededExecutor {
  public:
    FaultyExecutor(uint64_t seed, Network* network, const Fault& fault)
        : SeededExecutor(seed, network, {fault.rank, is_stall(fault) ? fault.after + 1 : 0}),
          fault_(fault) {}

    using SeededExecutor::wait;
    WaitEnd wait(Condition condition, const RankState& rank, uint64_t max_ns) override {
        if (fault_.kind == Fault::Kind::Abort && rank.rank == fault_.rank &&
            ++waits_ > fault_.after)
            rank.abort(Outcome::Failed);
        return SeededExecutor::wait(condition, rank, max_ns);
    }

  private:
    static bool is_stall(const Fault& fault) { return fault.kind == Fault::Kind::Stall; }

    Fault fault_;
    uint64_t waits_ = 0;
};

// If nobody has missed the rank that stalled, it ends the others itself.
void end_stalled(const std::vector<RankState>& states) {
    for (const RankState& state : states) {
        if (state.stalled && !state.aborted()) state.abort(Outcome::Failed);
    }
}

// Whether somebody who waited for the stalled rank said so, unless nobody did or some were not
// recorded.
bool leads_to(const std::vector<RankState>& states, int stalled) {
    bool nobody = true;
    for (const RankState& state : states) {
        const ControlBlock& control = *state.control;
        if (control.incident_count > ControlBlock::kMaxIncidents) return true;
        if (state.rank == stalled) continue;
        nobody &= control.incident_count == 0;
        for (uint64_t i = 0; i < control.incident_count; ++i) {
            if (control.incidents[i].peer == stalled) return true;
        }
    }
    return nobody;
}

// After a program that gave up.
template <class Program, class AnyNetwork>
const char* reset(Program& program, AnyNetwork& network, const Fault& fault) {
    if (fault.kind == Fault::Kind::None) return "aborted";
    if (fault.kind == Fault::Kind::Stall && !leads_to(program.states, fault.rank))
        return "nobody names the rank that stalled";
    network.clear();
    program.reset();
    return nullptr;
}

// What went wrong that should not have; null: nothing.
template <class AnyNetwork>
const char* run_normal(NormalProgram& program, AnyNetwork& network,
                       const std::vector<RoleTask>& tasks, uint64_t seed, const Fault& fault) {
    FaultyExecutor(seed, &network, fault).run(tasks);
    end_stalled(program.states);
    if (program.errors(tasks)) return "wrong values, or an unfinished call without a failure";
    if (!program.aborted()) return nullptr;
    if (const char* wrong = reset(program, network, fault)) return wrong;
    SeededExecutor(seed + 1, &network).run(tasks);
    return program.errors(tasks) || program.aborted() ? "wrong after a reset" : nullptr;
}

template <class Fabric>
const char* run_normal(uint64_t seed, const Fault& fault) {
    SimulatedNetwork network(fault.loss());
    NormalProgram program(seed, &network);
    return run_normal(program, network, program.tasks<FaultyWarp, Fabric>(), seed, fault);
}

template <class AnyNetwork, class AnyFabric>
const char* run_low_latency(LowLatencyProgram& program, AnyNetwork& network,
                            std::vector<AnyFabric>& fabrics, uint64_t seed, const Fault& fault) {
    std::vector<uint64_t> finished;
    // after a second replay nobody could tell what the first has left
    const int replays = fault.kind == Fault::Kind::None ? 3 : 1;
    FaultyExecutor(seed, &network, fault)
        .run(program.tasks<HesitantWarp>(replays, finished, fabrics));
    end_stalled(program.states);
    if (program.errors(finished)) return "wrong values";
    if (!program.aborted()) return program.errors() ? "an unfinished call" : nullptr;
    if (const char* wrong = reset(program, network, fault)) return wrong;
    SeededExecutor(seed + 1, &network).run(program.tasks<HesitantWarp>(3, finished, fabrics));
    return program.errors() || program.aborted() ? "wrong after a reset" : nullptr;
}

const char* run_low_latency(uint64_t seed, const Fault& fault) {
    SimulatedNetwork network(fault.loss());
    LowLatencyProgram program(seed, &network);
    return run_low_latency(program, network, program.fabrics, seed, fault);
}

constexpr Topology kMost = {4, 4};  // over queues

const char* run_normal_over_queues(uint64_t seed, const Fault& fault) {
    NormalProgram program(seed, nullptr, kMost);
    SoftwareNetwork network(seed, program.heap, program.heaps, program.states, fault.loss());
    const auto tasks = program.tasks<HostWarp>([&](int rank) { return network.fabric_of(rank); });
    return run_normal(program, network, tasks, seed, fault);
}

// masking: as run_masked, and the fault is a lost connection or none.
const char* run_low_latency_over_queues(uint64_t seed, const Fault& fault, bool masking) {
    LowLatencyProgram program(seed, nullptr, 2, LowLatencyProgram::Sizes::OfWarps, masking, false,
                              kMost);
    SoftwareNetwork network(seed, program.heap, program.heaps, program.states, fault.loss(),
                            masking);
    std::vector<QueueFabric> fabrics;
    for (const RankState& state : program.states) fabrics.push_back(network.fabric_of(state.rank));
    if (!masking) return run_low_latency(program, network, fabrics, seed, fault);
    std::mt19937_64 random(~seed);
    int gone = 0;
    return run_masked<PatientExecutor>(program, network, fabrics, seed, random, fault.loss() != 0,
                                       gone);
}

const char* run(uint64_t seed) {
    std::mt19937_64 random(~seed);
    Fault fault;
    if (random() % 3 == 0) {
        fault = {static_cast<Fault::Kind>(1 + random() % 3), static_cast<int>(random() % 4),
                 1 + random() % (1 << random() % 9)};
    }
    int gone = 0;
    switch (random() % 7) {
        case 0:
            return run_low_latency(seed, fault);
        case 1:
            return run_normal<HostFabric>(seed, fault);
        case 2:
            return run_masked(seed, gone);
        case 3:
            return run_normal_over_queues(seed, fault);
        case 4:
            return run_low_latency_over_queues(seed, fault, false);
        case 5:
            return run_low_latency_over_queues(seed, fault, true);
        default:
            return run_normal<MappedHostFabric>(seed, fault);
    }
}

const char* run_without_credits(uint64_t seed) {
    SimulatedNetwork network;
    NormalProgram program(seed, &network);
    FaultyWarp::gives_credit = false;
    SeededExecutor(seed, &network).run(program.tasks<FaultyWarp, HostFabric>());
    return program.aborted() ? "aborted" : nullptr;
}

template <int kUnderWay>
const char* run_halves(uint64_t seed) {
    SimulatedNetwork network;
    LowLatencyProgram program(seed, &network, kUnderWay, LowLatencyProgram::Sizes::OfWarps, false,
                              seed % 2);
    std::vector<uint64_t> finished;
    SeededExecutor(seed, &network).run(program.tasks<HesitantWarp>(3, finished));
    if (program.aborted()) return "aborted";
    return program.errors() ? "wrong values" : nullptr;
}

int masks_set = 0;
const char* run_masks(uint64_t seed) { return run_masked(seed, masks_set); }

struct Mode {
    const char* name;
    const char* (*run)(uint64_t seed);
    bool may_fail = false;
};
constexpr Mode kModes[] = {{"low_latency", run_halves<2>},
                           {"masks", run_masks},
                           {"three", run_halves<3>, true},
                           {"without_credits", run_without_credits, true},
                           {"", run}};

int run_for(std::chrono::seconds limit, uint64_t first, const char* program) {
    using Clock = std::chrono::steady_clock;
    constexpr int kMaxSeconds = 60;  // a program takes milliseconds
    const auto end = Clock::now() + limit;
    std::atomic<uint64_t> next = first;
    std::atomic<bool> failed = false;
    std::mutex printing;
    auto fail = [&](uint64_t seed, const char* wrong) {
        const std::lock_guard lock(printing);
        std::printf("seed %lu: %s. Again: %s %lu %lu\n", seed, wrong, program, seed, seed + 1);
        std::fflush(stdout);
        failed = true;
    };
    auto work = [&] {
        std::atomic<uint64_t> seed = 0;
        std::atomic<Clock::time_point> started = Clock::now();
        std::jthread watch([&](const std::stop_token& stop) {
            while (!stop.stop_requested()) {
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
                if (Clock::now() - started.load() > std::chrono::seconds(kMaxSeconds)) {
                    fail(seed, "it does not end");
                    std::_Exit(1);
                }
            }
        });
        while (!failed && Clock::now() < end) {
            started = Clock::now();
            seed = next++;
            if (const char* wrong = run(seed)) fail(seed, wrong);
        }
    };
    {
        std::vector<std::jthread> threads;
        for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i)
            threads.emplace_back(work);
    }
    std::printf("%lu schedules from seed %lu on, %s\n", next - first, first,
                failed ? "one wrong" : "none wrong");
    return failed;
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
    if (mode == "seconds" && (argc == 3 || argc == 4)) {
        const uint64_t first = argc == 4 ? number(3) : std::random_device()() * 1'000'000ull;
        return ep::run_for(std::chrono::seconds(number(2)), first, argv[0]);
    }
    const auto* chosen =
        std::ranges::find(ep::kModes, argc == 4 ? mode : "",
                          [](const ep::Mode& one) { return std::string(one.name); });
    if (argc < 3 || argc > 4 || chosen == std::end(ep::kModes)) return 2;
    const uint64_t first = number(argc - 2), end = number(argc - 1);
    uint64_t failed = 0;
    for (uint64_t seed = first; seed < end; ++seed) {
        const char* wrong = chosen->run(seed);
        if (wrong && !chosen->may_fail)
            return std::fprintf(stderr, "seed %lu: %s\n", seed, wrong), 1;
        failed += wrong != nullptr;
    }
    if (mode == "masks") std::printf("%d masks were set; ", ep::masks_set);
    std::printf("%lu of %lu programs fail\n", failed, end - first);
}
