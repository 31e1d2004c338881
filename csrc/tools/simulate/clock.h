// The clock of virtual time, and the fibers that it runs as warps.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/incident.h"
#include "tools/simulate/stacks.h"

namespace ep {

constexpr double kNever = 1e300;
constexpr int kWaits = static_cast<int>(Wait::SendQueue) + 1;

// What a warp did in one role, in ns.
struct VirtualTask {
    Role role = Role::Launch;
    double began = 0, ended = 0;
    double copied = 0;  // time spent in copies and sums
    std::array<double, kWaits> waited{};
};

// A warp in virtual time: where it runs, its time, and what it did.
struct VirtualFiber {
    int rank = 0, sm = 0, channel = 0;
    double time = 0;         // ns; its next operation happens no earlier
    double begun = 0;        // when it, or its half, began
    double writes_done = 0;  // when all that it stored has been written
    double row_begun = 0;    // when it began to read its next row
    VirtualTask task;        // current
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
    uint64_t sleeps = 0;  // so far: a wake-up must mean the current one
    double deadline = kNever;
    bool is_asleep = false, is_done = false, expired = false;
};

// Time that passes from event to event. Each fiber has its own time, which its operations move on.
// Before it reads a flag, stores to one that others of its rank read, or takes a shared resource,
// it catches up: all earlier events have happened then. Otherwise it would take the resource before
// fibers that come to it earlier, and they would queue behind it.
//
// Events of the same time happen in the order of their scheduling, or with a seed in a random one.
class VirtualClock {
  public:
    using Happen = void (*)(void* object, uint64_t value, double time);

    explicit VirtualClock(uint64_t seed = 0) : seed_(seed), random_(seed) {}
    VirtualClock(const VirtualClock&) = delete;

    // Schedules happen(object, value, time).
    void at(double time, Happen happen, void* object, uint64_t value = 0);
    // Starts a fiber at its time.
    void spawn(VirtualFiber& fiber, std::function<void()> body);
    // Runs until no event is left and all fibers have ended; if all that are left sleep, the one
    // with the first deadline resumes. Throws what a fiber threw. on_progress: called at times, may
    // throw.
    void run(const std::function<void()>& on_progress);

    // ---- called by the running fiber

    VirtualFiber& current() { return *current_; }
    void catch_up(VirtualFiber& fiber) {
        while (!queue_.empty() && queue_.front().time < fiber.time) advance(fiber);
    }
    // Sleeps until a store to one of the flags that were asked for. Returns false on the deadline.
    bool sleep(VirtualFiber& fiber, double deadline);

    // Records which flags a condition reads: all of them, and the most that one lane reads.
    void ask() { asked_.clear(), asked_by_lane_ = max_asked_ = 0; }
    void ask_lane() { asked_by_lane_ = 0; }
    static void note_asked(uint64_t* flag) {
        VirtualClock& clock = *running_;
        clock.asked_.push_back(flag);
        if (++clock.asked_by_lane_ > clock.max_asked_) clock.max_asked_ = clock.asked_by_lane_;
    }
    int max_asked() const { return max_asked_; }

    // ---- called by events

    // Resumes the fibers that sleep on the flag.
    void wake(uint64_t* flag, double time);
    void wake_all(double time);
    // At `time` the flag becomes `value`, if it is less.
    void store_at(double time, uint64_t* flag, uint64_t value);
    void add_at(double time, uint64_t* flag, uint64_t value);

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
    uint64_t announced_ = 0;
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
