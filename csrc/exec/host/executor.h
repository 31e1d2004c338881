#pragma once

#include <chrono>
#include <functional>
#include <type_traits>
#include <vector>

#include "exec/host/rank_state.h"

namespace ep {

// A condition to poll, by reference: it outlives the wait that it is passed to.
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

// What lets the roles of one or more ranks wait for each other.
class Executor {
  public:
    virtual ~Executor() = default;

    // Returns once the condition holds, the rank's abort flag is up, or the rank's timeout or so
    // many ns have passed.
    virtual WaitEnd wait(Condition condition, const RankState& rank, uint64_t max_ns) = 0;
    WaitEnd wait(Condition condition, const RankState& rank) {
        return wait(condition, rank, ~uint64_t{0});
    }

    // How long there was nothing to do but wait, so far. 0 where time does not pass.
    virtual uint64_t idle_ns() { return 0; }

    // Whether a role whose wait is already over should let others run first all the same.
    virtual bool preempts() { return false; }
};

// A role of a rank, ready to run.
struct RoleTask {
    RankState* rank;
    std::function<void(Executor&)> run;
};

}  // namespace ep
