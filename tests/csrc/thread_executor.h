#pragma once

#include <thread>

#include "exec/host/executor.h"

namespace ep {

// Runs every role as an OS thread, so that ThreadSanitizer sees the protocol.
class ThreadExecutor : public Executor {
  public:
    void run(std::vector<RoleTask> tasks) {
        std::vector<std::jthread> threads;
        for (RoleTask& task : tasks) threads.emplace_back([this, &task] { task.run(*this); });
    }

    using Executor::wait;
    WaitEnd wait(Condition condition, const RankState& rank, uint64_t max_ns) override {
        const auto start = std::chrono::steady_clock::now();
        while (!condition()) {
            if (rank.aborted()) return WaitEnd::Aborted;
            if (rank.expired(start, max_ns)) return WaitEnd::Expired;
            std::this_thread::yield();
        }
        return WaitEnd::Met;
    }
};

}  // namespace ep
