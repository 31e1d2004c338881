#include "tools/simulate/clock.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace ep {

constinit thread_local VirtualClock* VirtualClock::running_ = nullptr;

void VirtualClock::at(double time, Happen happen, void* object, uint64_t value) {
    const uint64_t order = seed_ ? random_() : ++announced_;
    queue_.push_back({time, order, happen, object, value});
    std::push_heap(queue_.begin(), queue_.end(), is_later);
}

VirtualClock::Event VirtualClock::take_first() {
    std::pop_heap(queue_.begin(), queue_.end(), is_later);
    const Event event = queue_.back();
    queue_.pop_back();
    return event;
}

void VirtualClock::spawn(VirtualFiber& fiber, std::function<void()> body) {
    fiber.body = std::move(body);
    fiber.begun = fiber.task.began = fiber.time;
    fibers_.push_back(&fiber);
    resume_at(fiber.time, fiber);
}

void VirtualClock::enter() {
    VirtualClock& clock = *running_;
    VirtualFiber& fiber = *clock.current_;
    try {
        fiber.body();
    } catch (...) {
        clock.error_ = std::current_exception();
    }
    fiber.is_done = true;
    clock.leave(fiber);
    std::abort();  // never reached
}

void VirtualClock::leave(VirtualFiber& fiber) { Stacks::switch_to(&fiber.context, main_); }

// Lets the first event happen. If it is another fiber's turn, this fiber is left.
void VirtualClock::advance(VirtualFiber& fiber) {
    if (queue_.front().happen) {
        const Event event = take_first();
        return event.happen(event.object, event.value, event.time);
    }
    resume_at(fiber.time, fiber);
    leave(fiber);
}

void VirtualClock::run(const std::function<void()>& on_progress) {
    constexpr uint64_t kTurns = 1 << 14;  // switches between two calls of on_progress
    VirtualClock* const before = running_;
    running_ = this;
    struct Restore {
        VirtualClock *clock, *before;
        ~Restore() {
            running_ = before;
            clock->fibers_.clear();
            clock->queue_.clear();
            clock->sleepers_.clear();
        }
    } restore{this, before};
    for (uint64_t turns = 0;; ++turns) {
        if (turns % kTurns == 0 && on_progress) on_progress();
        if (queue_.empty()) {
            VirtualFiber* next = nullptr;
            for (VirtualFiber* fiber : fibers_) {
                if (fiber->is_asleep && (!next || fiber->deadline < next->deadline)) next = fiber;
            }
            if (!next) break;
            next->expired = true;
            wake(*next, next->deadline);
        }
        const Event event = take_first();
        if (event.happen) {
            event.happen(event.object, event.value, event.time);
            continue;
        }
        VirtualFiber& fiber = *static_cast<VirtualFiber*>(event.object);
        if (!fiber.stack) fiber.stack = stacks_.prepare(&enter, &fiber.context);
        fiber.time = std::max(fiber.time, event.time);
        current_ = &fiber;
        Stacks::switch_to(&main_, fiber.context);
        if (fiber.is_done) {
            stacks_.release(fiber.stack);
            fiber.stack = nullptr;
        }
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    }
}

bool VirtualClock::sleep(VirtualFiber& fiber, double deadline) {
    constexpr size_t kMaxStale = 64;
    ++fiber.sleeps;
    for (uint64_t* flag : asked_) {
        std::vector<Sleeper>& list = sleepers_[flag];
        if (list.size() > kMaxStale)
            std::erase_if(list, [](const Sleeper& s) { return s.fiber->sleeps != s.sleep; });
        list.push_back({&fiber, fiber.sleeps});
    }
    fiber.deadline = deadline;
    fiber.is_asleep = true;
    fiber.expired = false;
    leave(fiber);
    return !fiber.expired;
}

void VirtualClock::wake(VirtualFiber& fiber, double time) {
    ++fiber.sleeps;
    fiber.is_asleep = false;
    resume_at(std::max(time, fiber.time), fiber);
}

void VirtualClock::wake(uint64_t* flag, double time) {
    const auto found = sleepers_.find(flag);
    if (found == sleepers_.end()) return;
    std::vector<Sleeper> list;
    list.swap(found->second);
    for (const Sleeper& sleeper : list) {
        if (sleeper.fiber->sleeps == sleeper.sleep && sleeper.fiber->is_asleep)
            wake(*sleeper.fiber, time);
    }
}

void VirtualClock::wake_all(double time) {
    for (VirtualFiber* fiber : fibers_) {
        if (fiber->is_asleep) wake(*fiber, time);
    }
}

void VirtualClock::store_at(double time, uint64_t* flag, uint64_t value) {
    at(
        time,
        [](void* object, uint64_t value, double time) {
            auto* flag = static_cast<uint64_t*>(object);
            if (*flag < value) *flag = value;
            running_->wake(flag, time);
        },
        flag, value);
}

void VirtualClock::add_at(double time, uint64_t* flag, uint64_t value) {
    at(
        time,
        [](void* object, uint64_t value, double time) {
            auto* flag = static_cast<uint64_t*>(object);
            *flag += value;
            running_->wake(flag, time);
        },
        flag, value);
}

}  // namespace ep
