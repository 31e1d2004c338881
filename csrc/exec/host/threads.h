#pragma once

#include <thread>

#include "exec/host/executor.h"

namespace ep {

// Every role an OS thread: how ThreadSanitizer gets to see the protocol.
class ThreadExecutor : public Executor {
  public:
    void run(std::vector<RoleTask> tasks) {
        std::vector<std::jthread> threads;
        for (RoleTask& task : tasks) threads.emplace_back([this, &task] { task.run(*this); });
    }

    WaitEnd wait(Condition condition, const RankState& rank) override {
        const auto start = std::chrono::steady_clock::now();
        while (!condition()) {
            if (rank.aborted()) return WaitEnd::Aborted;
            const auto now = std::chrono::steady_clock::now();
            if (now - start > rank.timeout || now > rank.deadline) return WaitEnd::Expired;
            std::this_thread::yield();
        }
        return WaitEnd::Met;
    }
};

}  // namespace ep
