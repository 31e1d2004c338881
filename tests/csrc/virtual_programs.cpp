// Random programs of the normal mode in virtual time, on machines whose constants are random, too:
// orders that follow from times, with a network that keeps none between queue pairs. Every value
// must be right.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>

#include "normal_programs.h"
#include "tools/simulate/virtual_fabric.h"

namespace ep {
namespace {

// What the warps and fabrics of a program run on.
struct VirtualWorld {
    VirtualCluster cluster;
    VirtualCards cards;
    NodeImages images;
};
VirtualWorld* world;

// What a program waits for between launches is no flag: it is looked at now and then.
class LookingExecutor : public Executor {
  public:
    WaitEnd wait(Condition condition, const RankState& rank, uint64_t) override {
        VirtualClock& clock = world->cluster.clock;
        VirtualFiber& fiber = clock.current();
        for (int look = 0; look < kMaxLooks; ++look) {
            if (condition()) return WaitEnd::Met;
            if (rank.aborted()) return WaitEnd::Aborted;
            fiber.time += kBetweenLooks;
            clock.catch_up(fiber);
        }
        return WaitEnd::Expired;
    }

  private:
    static constexpr int kMaxLooks = 1'000'000;
    static constexpr double kBetweenLooks = 5000;  // ns
};

class ProgramWarp : public VirtualWarp {
  public:
    ProgramWarp(Executor&, const RankState&, Role role, int channel)
        : VirtualWarp(world->cluster, world->cluster.clock.current(), role, channel) {}
};

template <bool kMapped>
class ProgramFabric : public VirtualFabric<kMapped> {
  public:
    ProgramFabric(Topology, int rank, const std::vector<char*>&, SimulatedNetwork*)
        : VirtualFabric<kMapped>(world->cluster, world->cards, rank, world->images, false) {}
};

Machine random_machine(std::mt19937_64& random) {
    std::uniform_real_distribution<double> exponent(0, 4);  // from nothing much to very slow
    const auto any = [&] { return std::pow(10, exponent(random)); };
    Machine machine;
    machine.sms = 1 + random() % 4;
    for (double Machine::* constant :
         {&Machine::step,         &Machine::ballot,        &Machine::poll,
          &Machine::flag_store,   &Machine::first_bytes,   &Machine::warp_copy,
          &Machine::warp_sum,     &Machine::warp_quantize, &Machine::sm_store,
          &Machine::sm_read,      &Machine::sm_sum,        &Machine::memory,
          &Machine::own_write,    &Machine::peer_write,    &Machine::own_flag,
          &Machine::peer_flag,    &Machine::link,          &Machine::card,
          &Machine::card_message, &Machine::card_post,     &Machine::card_doorbell,
          &Machine::card_way,     &Machine::card_signal})
        machine.*constant = any();
    machine.card_turn = random() % 2 ? any() : 0;
    return machine;
}

template <bool kMapped>
const char* run(uint64_t seed) {
    NormalProgram program(seed, nullptr);
    std::mt19937_64 random(seed);
    VirtualWorld all{{random_machine(random), program.heaps, program.heap.bytes(), seed},
                     VirtualCards(all.cluster),
                     {program.topology.nodes, program.heap, RowFormat(16, 0, 4, 1)}};
    all.cluster.row = {1 << 20, 0, 1 << 20, 0, 1 << 10};
    all.cluster.sums_rows = true;
    world = &all;
    const auto tasks = program.tasks<ProgramWarp, ProgramFabric<kMapped>>();
    std::deque<VirtualFiber> fibers;
    LookingExecutor executor;
    for (const RoleTask& task : tasks) {
        VirtualFiber& fiber = fibers.emplace_back();
        fiber.rank = task.rank->rank;
        fiber.sm = static_cast<int>(random() % all.cluster.machine.sms);
        all.cluster.clock.spawn(fiber, [&] { task.run(executor); });
    }
    all.cluster.clock.run({});
    if (program.aborted()) return "a wait never ended, or a row was not the one that was meant";
    return program.errors(tasks) ? "wrong values" : nullptr;
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    const uint64_t first = std::strtoull(argv[1], nullptr, 10),
                   end = std::strtoull(argv[2], nullptr, 10);
    for (uint64_t seed = first; seed < end; ++seed) {
        for (const char* wrong : {ep::run<false>(seed), ep::run<true>(seed)}) {
            if (wrong) return std::fprintf(stderr, "seed %lu: %s\n", seed, wrong), 1;
        }
    }
    std::printf("%lu programs, none wrong\n", end - first);
}
