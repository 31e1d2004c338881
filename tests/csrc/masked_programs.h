#pragma once

#include <algorithm>

#include "exec/host/fibers.h"
#include "low_latency_programs.h"

namespace ep {

// A rank stops at its n-th wait: for ever (0 slices), or for so many slices, and then for a while
// in which the others may go on.
class LateExecutor : public SeededExecutor {
  public:
    LateExecutor(uint64_t seed, Network* network, int late, uint64_t wait, int slices, int looks)
        : SeededExecutor(seed, network, slices ? Stall{} : Stall{late, wait}),
          late_(late),
          wait_(wait),
          slices_(slices),
          looks_(looks) {}

    using SeededExecutor::wait;
    WaitEnd wait(Condition condition, const RankState& rank, uint64_t ns) override {
        if (rank.rank == late_ && ++waits_ >= wait_) {
            auto never = [] { return false; };
            for (; slices_ > 0; --slices_) SeededExecutor::wait(Condition(never), rank, kLimit);
            auto later = [this] { return --looks_ < 0; };
            if (looks_ > 0) SeededExecutor::wait(Condition(later), rank, kLimit);
        }
        return SeededExecutor::wait(condition, rank, ns);
    }
    bool was_late() const { return waits_ >= wait_; }

  private:
    static constexpr uint64_t kLimit = 1;  // ns: any, since time does not pass

    int late_;
    uint64_t wait_, waits_ = 0;
    int slices_, looks_;
};

// Waits without a limit of their own, as those for room in a queue, last longer than any rank is
// late.
class PatientExecutor : public LateExecutor {
  public:
    using LateExecutor::LateExecutor;

  protected:
    void idle() override {
        if (!expire_limited()) LateExecutor::idle();
    }
};

// Time may pass while messages are under way: waits then end before what they wait for arrives.
class LateNetwork : public SimulatedNetwork {
  public:
    explicit LateNetwork(bool late) : late_(late) {}
    bool deliver(std::mt19937_64& random) override {
        return (!late_ || random() % 8 == 0) && SimulatedNetwork::deliver(random);
    }

  private:
    bool late_;
};

// Where a rank may stop others may come between any two of its steps, and it may stop at any.
class HesitantWarp : public HostWarp {
    using Base = HostWarp;

  public:
    HesitantWarp(Executor& executor, const RankState& rank, Role role, int channel)
        : Base(executor, rank, role, channel),
          executor_(dynamic_cast<LateExecutor*>(&executor)),
          rank_(rank) {}

    template <CacheHint hint>
    void multicast(const PerLane<void*>& dsts, uint32_t mask, const void* src, size_t bytes) {
        hesitate();
        Base::multicast<hint>(dsts, mask, src, bytes);
    }
    template <class T, CacheHint hint, class Weights>
    void sum(void* dst, const PerLane<const void*>& srcs, const Weights& weights, uint32_t mask,
             size_t count) {
        hesitate();
        Base::template sum<T, hint>(dst, srcs, weights, mask, count);
    }
    template <Scope scope, class F>
    void publish_lanes(int count, F&& f) {
        hesitate();
        Base::publish_lanes<scope>(count, f);
    }
    template <Scope scope, class F>
    void credit_lanes(int count, F&& f) {
        hesitate();
        Base::credit_lanes<scope>(count, f);
    }
    template <Scope scope>
    uint64_t arrive(uint64_t* counter, uint64_t n = 1) {
        hesitate();
        return Base::arrive<scope>(counter, n);
    }

  private:
    void hesitate() {
        auto at_any_time = [] { return true; };
        if (executor_) executor_->wait(Condition(at_any_time), rank_);
    }

    LateExecutor* executor_;
    const RankState& rank_;
};

// A program with masking: one rank may stop for good or for a while, callers mask others.
// Nobody ends but who came too late, alone, and no two ranks go on that have each other for dead;
// over a network that is late itself, or breaks, any rank may end.
// What went wrong, null: nothing. gone: counts the ranks that others have masked.
template <class AnyLateExecutor, class AnyFabric>
const char* run_masked(LowLatencyProgram& program, Network& network,
                       std::vector<AnyFabric>& fabrics, uint64_t seed, std::mt19937_64& random,
                       bool late_network, int& gone) {
    constexpr int kReplays = 3;
    const int world = program.topology.world();
    const int late = random() % 4 ? static_cast<int>(random() % world) : -1;
    AnyLateExecutor executor(seed, &network, late, 1 + random() % (1 << random() % 10),
                             random() % 4 ? 1 + static_cast<int>(random() % 10) : 0,
                             static_cast<int>(random() % (1 << random() % 12)));
    std::vector<uint64_t> finished;
    auto tasks = program.tasks<HesitantWarp>(kReplays, finished, fabrics);
    std::shuffle(tasks.begin(), tasks.end(), random);
    executor.run(tasks);
    if (program.wrong) return "wrong values, or no single membership";
    for (int rank = 0; rank < world; ++rank) {
        const bool is_late = rank == late && executor.was_late();
        const uint64_t word = program.controls[rank].abort;
        if (word && word != ControlBlock::abort_word(Outcome::CutOff, rank)) return "aborted";
        if (word && !is_late && !late_network) return "a rank that took part was masked";
        if (!word && !is_late && program.launches[rank] != kReplays * program.halves[rank].size())
            return "a rank did not finish";
        for (int other = 0; other < world; ++other) {
            if (!program.gone[rank][other]) continue;
            ++gone;
            const bool asked = program.masked[rank][other] || program.masked[other][rank];
            if (!asked && !late_network && !is_late && (other != late || !executor.was_late()))
                return "a rank that took part was masked";
            const bool both_go_on =
                !program.states[rank].aborted() && !program.states[other].aborted();
            if (both_go_on && !asked && program.gone[other][rank] && fabrics[rank].maps(other))
                return "two ranks go on that have taken each other for dead";
        }
    }
    return nullptr;
}

inline const char* run_masked(uint64_t seed, int& gone) {
    std::mt19937_64 random(~seed);
    const bool late_network = random() % 4 == 0;
    LateNetwork network(late_network);
    LowLatencyProgram program(seed, &network, 2, LowLatencyProgram::Sizes::OfWarps, true);
    return run_masked<LateExecutor>(program, network, program.fabrics, seed, random, late_network,
                                    gone);
}

}  // namespace ep
