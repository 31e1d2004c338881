#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/incident.h"
#include "exec/virtual/stacks.h"

namespace ep {

constexpr double kNever = 1e300;
constexpr int kWaits = static_cast<int>(Wait::SendQueue) + 1;

// A wait of a warp, in ns.
struct WaitSpan {
    Wait wait;
    double begin, end;
};

// What a warp did as one role, in ns.
struct VirtualTask {
    Role role = Role::Launch;
    double began = 0, ended = 0;
    double copied = 0;  // time spent in copies and sums
    std::array<double, kWaits> waited{};
    std::vector<WaitSpan> waits;  // of a warp that is traced
};

// A warp in virtual time: where it runs, how far it has come, and what it did.
struct VirtualFiber {
    int rank = 0, sm = 0, channel = 0;
    bool is_traced = false;
    double time = 0;         // ns; what it does next happens no earlier
    double begun = 0;        // when it began, or its half
    double writes_done = 0;  // when all that it stored has been written
    double row_begun = 0;    // when it began to read its next row
    VirtualTask task;        // that it is at
    std::vector<VirtualTask> earlier;

    void begin_task(Role role) {
        task.ended = time;
        earlier.push_back(std::move(task));
        task = {};
        task.role = role;
        task.began = time;
    }

  private:
    friend class VirtualClock;
    std::function<void()> body;
    void* stack = nullptr;
    void* context = nullptr;
    uint64_t sleeps = 0;  // so far: who wakes it must mean the one that it is in
    double deadline = kNever;
    bool is_asleep = false, is_done = false, expired = false;
};

// Time that passes from one thing that happens to the next. Each fiber has a time of its own, which
// its operations move on. Before it reads a flag, stores to one that others of its rank read, or
// takes what others share, it catches up: all that is earlier has happened then. Without that a
// fiber that runs ahead would take what others come to earlier, and they would queue behind it.
//
// Things that happen at the same time happen in the order in which they were announced, or with a
// seed in a random one.
class VirtualClock {
  public:
    using Happen = void (*)(void* object, uint64_t value, double time);

    explicit VirtualClock(uint64_t seed = 0) : seed_(seed), random_(seed) {}
    VirtualClock(const VirtualClock&) = delete;

    // happen(object, value, time), then.
    void at(double time, Happen happen, void* object, uint64_t value = 0);
    // A fiber that begins at its time.
    void spawn(VirtualFiber& fiber, std::function<void()> body);
    // Until nothing more happens and all fibers have ended: when all that are left sleep, the one
    // whose deadline is first goes on. Throws what a fiber threw. look: called now and then, may
    // throw.
    void run(const std::function<void()>& look);

    // ---- by the fiber that runs

    VirtualFiber& current() { return *current_; }
    void catch_up(VirtualFiber& fiber) {
        while (!queue_.empty() && queue_.front().time < fiber.time) advance(fiber);
    }
    // Until somebody stores to one of the flags that were asked for, or the deadline. False: it is
    // the deadline.
    bool sleep(VirtualFiber& fiber, double deadline);

    // Which flags a condition asks for: all of them, and how many the lane that asks for most.
    void ask() { asked_.clear(), asked_by_lane_ = max_asked_ = 0; }
    void ask_lane() { asked_by_lane_ = 0; }
    static void note_asked(uint64_t* flag) {
        VirtualClock& clock = *running_;
        clock.asked_.push_back(flag);
        if (++clock.asked_by_lane_ > clock.max_asked_) clock.max_asked_ = clock.asked_by_lane_;
    }
    int max_asked() const { return max_asked_; }

    // ---- by whatever happens

    // Fibers that sleep on the flag go on.
    void wake(uint64_t* flag, double time);
    void wake_all(double time);
    // The flag becomes `value` then, if it is less.
    void store_at(double time, uint64_t* flag, uint64_t value);
    void add_at(double time, uint64_t* flag, uint64_t value);

    uint64_t switches() const { return switches_; }
    uint64_t happened() const { return happened_; }

  private:
    struct Event {
        double time;
        uint64_t order;
        Happen happen;  // null: the fiber `object` goes on
        void* object;
        uint64_t value;
    };
    struct Sleeper {
        VirtualFiber* fiber;
        uint64_t sleep;
    };
    static bool is_later(const Event& a, const Event& b) {
        return a.time != b.time ? a.time > b.time : a.order > b.order;
    }

    static void enter();
    void advance(VirtualFiber& fiber);
    Event take_first();
    void resume_at(double time, VirtualFiber& fiber) { at(time, nullptr, &fiber); }
    void leave(VirtualFiber& fiber);
    void wake(VirtualFiber& fiber, double time);

    static constinit thread_local VirtualClock* running_;

    uint64_t seed_;
    std::mt19937_64 random_;
    std::vector<Event> queue_;  // a heap
    uint64_t announced_ = 0, switches_ = 0, happened_ = 0;
    std::unordered_map<uint64_t*, std::vector<Sleeper>> sleepers_;
    std::vector<uint64_t*> asked_;
    int asked_by_lane_ = 0, max_asked_ = 0;
    Stacks stacks_;
    std::vector<VirtualFiber*> fibers_;
    VirtualFiber* current_ = nullptr;
    void* main_ = nullptr;
    std::exception_ptr error_;
};

}  // namespace ep
