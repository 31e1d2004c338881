#include "exec/host/fibers.h"

#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <new>
#include <optional>

#include "exec/host/rows.h"

namespace ep {

using Clock = std::chrono::steady_clock;

namespace {
struct Stalled {};  // ends a role as if it had stopped forever
}  // namespace

struct FiberExecutor::Fiber {
    static constexpr size_t kStackBytes = 256 << 10;

    ucontext_t context;
    ucontext_t scheduler;
    void* stack;
    RoleTask task;
    std::optional<Condition> condition;  // what it waits for, if it waits
    uint64_t max_ns = 0;                 // limit of its wait
    Clock::time_point wait_start;
    bool timing = false;  // wait_start is set, which it is once the executor has been idle
    WaitEnd end = WaitEnd::Met;
    bool done = false;

    Fiber() {
        stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        if (stack == MAP_FAILED) throw std::bad_alloc();
        mprotect(stack, 4096, PROT_NONE);  // an overflow faults instead of corrupting
    }
    ~Fiber() { munmap(stack, kStackBytes); }
    Fiber(const Fiber&) = delete;

    bool expired() {
        if (!timing) {
            timing = true;
            wait_start = Clock::now();
        }
        return task.rank->expired(wait_start, max_ns);
    }
};

FiberExecutor::FiberExecutor() = default;
FiberExecutor::~FiberExecutor() = default;

void FiberExecutor::begin(Fiber& fiber) {
    // makecontext passes ints only
    thread_local FiberExecutor* executor;
    executor = this;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = Fiber::kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, [] { executor->body(); }, 0);
    resume(fiber);
}

void FiberExecutor::body() {
    Fiber& fiber = *current_;
    try {
        if (fiber.task.rank->stalled) throw Stalled{};
        fiber.task.run(*this);
    } catch (const Stalled&) {
        fiber.task.rank->give_up();
    } catch (...) {
        error_ = std::current_exception();
        fiber.task.rank->give_up();
        fiber.task.rank->abort(Outcome::Failed);
    }
    fiber.task.run = nullptr;
    fiber.done = true;
    swapcontext(&fiber.context, &fiber.scheduler);
}

void FiberExecutor::run(std::vector<RoleTask> tasks, std::function<bool()> interrupted) {
    // First everything that can fail for lack of memory.
    while (spare_.size() < tasks.size()) spare_.push_back(std::make_unique<Fiber>());
    fibers_.reserve(tasks.size());
    interrupted_ = std::move(interrupted);
    error_ = nullptr;
    for (RoleTask& task : tasks) {
        fibers_.push_back(std::move(spare_.back()));
        spare_.pop_back();
        Fiber& fiber = *fibers_.back();
        fiber.task = std::move(task);
        fiber.done = false;
    }
    for (auto& fiber : fibers_) begin(*fiber);
    retire();
    while (!fibers_.empty()) {
        if (step()) {
            if (idle_passes_) idle_ = std::chrono::nanoseconds(idle_ns());
            idle_passes_ = 0;
        } else {
            if (!idle_passes_) idle_since_ = Clock::now();
            idle();
        }
        retire();
    }
    interrupted_ = nullptr;
    finish_streaming();
    if (error_) std::rethrow_exception(error_);
}

void FiberExecutor::expire(Fiber& fiber) {
    fiber.end = WaitEnd::Expired;
    resume(fiber);
}

void FiberExecutor::retire() {
    for (auto& fiber : fibers_) {
        if (fiber->done) spare_.push_back(std::move(fiber));
    }
    std::erase(fibers_, nullptr);
}

void FiberExecutor::resume(Fiber& fiber) {
    current_ = &fiber;
    fiber.condition.reset();
    fiber.timing = false;
    swapcontext(&fiber.scheduler, &fiber.context);
    current_ = nullptr;
}

WaitEnd FiberExecutor::wait(Condition condition, const RankState& rank, uint64_t max_ns) {
    Fiber& fiber = *current_;
    fiber.condition = condition;
    fiber.max_ns = max_ns;
    swapcontext(&fiber.context, &fiber.scheduler);
    if (rank.stalled) throw Stalled{};
    return fiber.end;
}

uint64_t FiberExecutor::idle_ns() {
    const auto now = idle_passes_ ? Clock::now() - idle_since_ : Clock::duration(0);
    return (idle_ + std::chrono::duration_cast<std::chrono::nanoseconds>(now)).count();
}

bool FiberExecutor::try_resume(Fiber& fiber) {
    if (fiber.done) return false;
    if ((*fiber.condition)()) {
        fiber.end = WaitEnd::Met;
    } else if (fiber.task.rank->aborted()) {
        fiber.end = WaitEnd::Aborted;
    } else {
        return false;
    }
    resume(fiber);
    return true;
}

bool FiberExecutor::step() {
    bool progress = false;
    for (auto& fiber : fibers_) progress |= try_resume(*fiber);
    return progress;
}

void FiberExecutor::expire_all() {
    for (auto& fiber : fibers_) expire(*fiber);
}

bool FiberExecutor::expire_limited() {
    bool any = false;
    for (auto& fiber : fibers_) {
        if (fiber->max_ns == ~uint64_t{0}) continue;
        expire(*fiber);
        any = true;
    }
    return any;
}

void FiberExecutor::idle() {
    constexpr int kYields = 64;
    constexpr int kClockEvery = 16;
    constexpr long kFirstSleep = 20'000, kMaxSleep = 1'000'000;  // ns
    if (++idle_passes_ % kClockEvery == 0 || idle_passes_ > kYields) {
        for (auto& fiber : fibers_) {
            if (!fiber->done && fiber->expired()) expire(*fiber);
        }
        if (interrupted_ && interrupted_()) fibers_.front()->task.rank->abort(Outcome::Interrupted);
    }
    if (idle_passes_ <= kYields) {
        sched_yield();
    } else {
        const timespec pause{
            0, std::min(kMaxSleep, kFirstSleep << std::min(6, (idle_passes_ - kYields) / 8))};
        nanosleep(&pause, nullptr);
    }
}

WaitEnd SeededExecutor::wait(Condition condition, const RankState& rank, uint64_t max_ns) {
    if (rank.rank == stall_.rank && ++waits_ == stall_.wait) rank.stalled = true;
    return FiberExecutor::wait(condition, rank, max_ns);
}

bool SeededExecutor::step() {
    if (network_ && random_() % 4 == 0 && network_->deliver(random_)) return true;
    const size_t first = random_() % num_fibers();
    for (size_t i = 0; i < num_fibers(); ++i) {
        if (try_resume(fiber((first + i) % num_fibers()))) return true;
    }
    return network_ && network_->deliver(random_);
}

void SeededExecutor::idle() { expire_all(); }

}  // namespace ep
