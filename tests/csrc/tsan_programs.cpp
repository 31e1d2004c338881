// Random programs of both modes under ThreadSanitizer, every warp of every rank a thread: no data
// race, every value right.
//
//     tsan_programs normal|mapped|low_latency [relaxed]
//
// mapped: rows for another node are packed in its ring itself. relaxed: what warps publish is not
// released, or over the mapped rail its signals and nothing else. ThreadSanitizer must report the
// race.

#include <string>
#include <thread>

#include "faulty_warp.h"
#include "low_latency_programs.h"
#include "normal_programs.h"

extern "C" void AnnotateBenignRaceSized(const char* file, int line, const volatile void* memory,
                                        size_t bytes, const char* why);

namespace ep {
namespace {

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

struct MappedFabric : MappedHostFabric {
    using MappedHostFabric::MappedHostFabric;
    static inline bool releases = true;

    template <class W>
    void signal_to(W& warp, int channel, int rank, size_t flag, uint64_t from, uint64_t to) {
        if (releases) return MappedHostFabric::signal_to(warp, channel, rank, flag, from, to);
        std::atomic_ref<uint64_t>(*at<uint64_t>(rank, flag)).store(to, std::memory_order_relaxed);
    }
};

// What went wrong; null: nothing.
template <class Fabric>
const char* run_normal(uint64_t seed) {
    NormalProgram program(seed, nullptr);
    for (const NormalProgram::Handle& handle : program.handles) {
        for (const NormalProgram::Share& share : handle.shares) {
            const int32_t& overflow = share.notify.layout.totals().overflow;
            AnnotateBenignRaceSized(__FILE__, __LINE__, &overflow, sizeof overflow,
                                    "all who write it write 1");
        }
    }
    const auto tasks = program.tasks<FaultyWarp, Fabric>();
    ThreadExecutor().run(tasks);
    if (program.aborted()) return "aborted";
    return program.errors(tasks) ? "wrong values" : nullptr;
}

const char* run_low_latency(uint64_t seed) {
    LowLatencyProgram program(seed, nullptr, 2, LowLatencyProgram::Sizes::OfWarps, seed % 2,
                              seed % 4 == 2);
    std::vector<uint64_t> finished;
    ThreadExecutor().run(program.tasks<FaultyWarp>(3, finished));
    if (program.aborted()) return "aborted";
    return program.errors() || program.wrong ? "wrong values" : nullptr;
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const bool is_mapped = mode == "mapped";
    const auto run = is_mapped          ? ep::run_normal<ep::MappedFabric>
                     : mode == "normal" ? ep::run_normal<ep::HostFabric>
                                        : ep::run_low_latency;
    (is_mapped ? ep::MappedFabric::releases : ep::FaultyWarp::releases) = argc == 2;
    for (uint64_t seed = 0; seed < (mode == "low_latency" ? 30 : 40); ++seed) {
        if (const char* wrong = run(seed))
            return std::fprintf(stderr, "seed %lu: %s\n", seed, wrong), EXIT_FAILURE;
    }
}
