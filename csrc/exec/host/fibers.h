#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "exec/host/executor.h"

namespace ep {

// Runs any number of roles as fibers of one OS thread, which switches only where a role waits. If
// none can run it yields its core, then sleeps for longer and longer: other ranks may need the core
// to make the progress that is waited for.
class FiberExecutor : public Executor {
  public:
    FiberExecutor();
    ~FiberExecutor() override;

    // `interrupted` is called from time to time while idle, and ends all waits if it returns true.
    // Throws what a role threw, after all have ended.
    void run(std::vector<RoleTask> tasks, std::function<bool()> interrupted = {});
    using Executor::wait;
    WaitEnd wait(Condition condition, const RankState& rank, uint64_t max_ns) override;
    uint64_t idle_ns() override;

  protected:
    struct Fiber;

    // One pass over all fibers, or one scheduling decision. False: there was nothing to do.
    virtual bool step();
    // Called when step found nothing to do.
    virtual void idle();

    // Resumes the fiber if its wait is over.
    bool try_resume(Fiber& fiber);
    void expire_all();
    // Ends the waits that have a limit. Returns whether there were any.
    bool expire_limited();
    size_t num_fibers() const { return fibers_.size(); }
    Fiber& fiber(size_t index) { return *fibers_[index]; }

  private:
    void begin(Fiber& fiber);
    void body();
    void resume(Fiber& fiber);
    void expire(Fiber& fiber);
    void retire();

    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<std::unique_ptr<Fiber>> spare_;  // finished: their stacks serve the next run
    Fiber* current_ = nullptr;
    std::function<bool()> interrupted_;
    std::exception_ptr error_;  // what a role threw
    int idle_passes_ = 0;
    std::chrono::steady_clock::time_point idle_since_;  // if idle_passes_ > 0
    std::chrono::nanoseconds idle_{0};                  // idle time before that
};

// The scheduler's view of a simulated network.
class Network {
  public:
    virtual ~Network() = default;
    // Delivers a message in flight; false: there is none.
    virtual bool deliver(std::mt19937_64& random) = 0;
};

// A rank that stops forever when it begins this wait, counted from 1; 0: none does.
struct Stall {
    int rank = 0;
    uint64_t wait = 0;
};

// Picks at random, from a seed, which role runs next and when the network delivers: the same seed
// gives the same interleaving. Time does not pass here: a wait expires when no role can ever run
// again.
class SeededExecutor : public FiberExecutor {
  public:
    SeededExecutor(uint64_t seed, Network* network, Stall stall = {})
        : random_(seed), network_(network), stall_(stall) {}

    using Executor::wait;
    WaitEnd wait(Condition condition, const RankState& rank, uint64_t max_ns) override;
    bool preempts() override { return random_() % 4 == 0; }
    uint64_t idle_ns() override { return 0; }

  protected:
    bool step() override;
    void idle() override;

  private:
    std::mt19937_64 random_;
    Network* network_;
    Stall stall_;
    uint64_t waits_ = 0;  // of the rank that stalls
};

}  // namespace ep
