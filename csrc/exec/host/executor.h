// How roles run and wait on the host: as fibers (fibers.h), or as threads of a test.
#pragma once

#include <functional>
#include <type_traits>

#include "exec/host/rank_state.h"

namespace ep {

// A condition to poll, by reference: it must outlive the wait that it is passed to.
class Condition {
  public:
    template <class F>
        requires(!std::is_same_v<std::remove_cvref_t<F>, Condition>)
    explicit Condition(F& f)
        : object_(&f), call_([](void* object) -> bool { return (*static_cast<F*>(object))(); }) {}

    bool operator()() const { return call_(object_); }

  private:
    void* object_;
    bool (*call_)(void*);
};

enum class WaitEnd { Met, Aborted, Expired };

// Lets the roles of one or more ranks wait for each other.
class Executor {
  public:
    virtual ~Executor() = default;

    // Waits until the condition holds, the rank is aborted, or its timeout or max_ns has passed.
    virtual WaitEnd wait(Condition condition, const RankState& rank, uint64_t max_ns) = 0;
    WaitEnd wait(Condition condition, const RankState& rank) {
        return wait(condition, rank, ~uint64_t{0});
    }

    // Nanoseconds so far in which nothing could run. 0 where time does not pass.
    virtual uint64_t idle_ns() { return 0; }

    // Whether a role whose condition holds already should let others run first.
    virtual bool preempts() { return false; }
};

// A role of a rank, ready to run.
struct RoleTask {
    RankState* rank;
    std::function<void(Executor&)> run;
};

}  // namespace ep
