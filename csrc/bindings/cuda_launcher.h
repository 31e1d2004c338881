#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "bindings/launcher.h"
#include "core/cuda/deferred_release.h"
#include "core/notify_args.h"
#include "launch/cuda/group.h"
#include "launch/cuda/low_latency.h"

namespace ep {

// Binds run_deferred in each extension module, because each has its own list of deferred releases.
inline void bind_run_deferred(pybind11::module_& m) {
    m.def("run_deferred", &run_deferred, pybind11::call_guard<pybind11::gil_scoped_release>(),
          "Gives back what belonged to objects that are gone, which call no CUDA when they go. "
          "Waits for the GPU if there is anything.");
}

template <class FabricParams>
class CudaLauncher : public RankLauncher {
  public:
    CudaLauncher(const Heap& heap, const FabricParams& fabric, std::vector<int> ranks,
                 const std::vector<char*>& own_heaps, const std::vector<char*>& heaps, int device,
                 int num_sms, double timeout)
        : group_(heap, fabric, std::move(ranks), own_heaps, heaps, device, num_sms, timeout) {}

    Counted launch(Phase phase, AllArgs args, void* stream) override {
        const auto lock = exclusive_call_.enter();
        if (phase == Phase::Combine) {
            auto& all = std::get<std::vector<CombineArgs>>(args);
            number(all, ++call_);
            group_.combine(all, dtype_of(all), stream);
            return {};
        }
        auto& all = std::get<std::vector<DispatchCallArgs>>(args);
        if (phase == Phase::Notify) return {wait_for_counts(all, {}, stream)};
        if (phase == Phase::SpeculativeDispatch && all.size() > 1)
            throw std::invalid_argument(
                "a dispatch ahead is for one rank: each of several would "
                "decide for itself");
        if (phase != Phase::DispatchRetry) ++call_;
        number(all, call_);
        if (phase == Phase::DispatchWithoutWait) {
            group_.dispatch_without_wait(all, stream);
            return {};
        }
        const std::vector<DispatchArgs> dispatches(all.begin(), all.end());
        if (phase == Phase::SpeculativeDispatch) {
            auto totals = wait_for_counts(all, dispatches, stream);
            const bool fits = totals.empty() || all.front().fits(totals.front());
            return {std::move(totals), fits};
        }
        group_.dispatch(dispatches, stream);
        return {};
    }

    const Heap& heap() const override { return group_.heap(); }
    const std::vector<int>& ranks() const override { return group_.ranks(); }
    CudaGroup<FabricParams>& group() { return group_; }
    // Returns what is to be called during a wait of the host.
    auto idle() {
        return [this] {
            const pybind11::gil_scoped_acquire gil;
            if (PyErr_CheckSignals() != 0) {
                group_.abort(Outcome::Interrupted, "");
                throw pybind11::error_already_set();
            }
            if (!watch.is_none()) watch();
        };
    }
    uint64_t aborted() const override { return group_.aborted(); }
    const ControlBlock& report(size_t index) const override { return group_.report(index); }
    void show_ranks(const std::function<void(int, const ControlBlock&)>& show) override {
        std::vector<ControlBlock> blocks;
        {
            const pybind11::gil_scoped_release release;
            blocks = group_.control_blocks();
        }
        for (size_t i = 0; i < blocks.size(); ++i)
            show(group_.first_in_reach() + static_cast<int>(i), blocks[i]);
    }
    std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t index) const override {
        return group_.waited(index);
    }
    void abort(Outcome outcome, const std::string& reason) override {
        group_.abort(outcome, reason);
    }
    std::vector<int64_t> count_times() const override {
        std::vector<int64_t> ns;
        for (const auto& time : group_.count_times())
            ns.push_back(time.time_since_epoch() / std::chrono::nanoseconds(1));
        return ns;
    }
    void listen() override { group_.listen(); }
    void drain() override { group_.drain(); }
    void note_capture(void* stream) override { group_.note_capture(stream); }
    int graphs() const override { return group_.graphs(); }
    bool orders_graphs() const override { return group_.orders_graphs(); }
    void retire() override { group_.retire(); }
    void reset() override {
        const auto lock = exclusive_call_.enter();
        group_.reset();
        call_ = 0;
    }

  private:
    template <class Args>
    static void number(std::vector<Args>& args, uint64_t call) {
        for (Args& a : args) a.call = call;
    }

    std::vector<Layout::Totals> wait_for_counts(const std::vector<DispatchCallArgs>& args,
                                                const std::vector<DispatchArgs>& ahead,
                                                void* stream) {
        return group_.notify_and_wait(notify_args(args), stream, idle(), ahead);
    }

    CudaGroup<FabricParams> group_;
    ExclusiveCall exclusive_call_;
    uint64_t call_ = 0;
};

template <class FabricParams>
class CudaLowLatencyLauncher : public LowLatencyLauncher {
  public:
    CudaLowLatencyLauncher(CudaLauncher<FabricParams>& launcher, const LowLatencyHeap& heap,
                           const FabricParams& fabric, const std::vector<char*>& own_heaps,
                           int blocks)
        : launcher_(launcher), ranks_(launcher.group(), heap, fabric, own_heaps, blocks) {}

    Counted launch(Phase phase, AllArgs args, void* stream) override {
        const LowLatencyLaunches launches = halves(phase);
        if (auto* dispatches = std::get_if<std::vector<LowLatencyDispatchArgs>>(&args)) {
            const bool waits =
                dispatches->front().host_waits && launches != LowLatencyLaunches::Send;
            if (waits) launcher_.group().request_reports(*dispatches);
            ranks_.dispatch(launches, *dispatches, stream);
            if (!waits) return {};
            return {launcher_.group().wait_for_reports(stream, launcher_.idle())};
        }
        const auto& combines = std::get<std::vector<LowLatencyCombineArgs>>(args);
        ranks_.combine(launches, combines, dtype_of(combines), stream);
        return {};
    }
    const LowLatencyHeap& heap() const override { return ranks_.heap(); }
    const std::vector<int>& ranks() const override { return ranks_.ranks(); }
    int warps() const override { return ranks_.warps(); }
    void reset() override { ranks_.reset(); }

  private:
    CudaLauncher<FabricParams>& launcher_;
    CudaLowLatency<FabricParams> ranks_;
};

// Returns a launcher as that of its fabric, which must be this one.
template <class FabricParams>
CudaLauncher<FabricParams>& launcher_of(RankLauncher& launcher) {
    return dynamic_cast<CudaLauncher<FabricParams>&>(launcher);
}

// Return launchers of one rank on a GPU over a fabric that has the heaps of its node's ranks.
template <class FabricParams>
std::unique_ptr<RankLauncher> launcher_over(const FabricParams& fabric, const Heap& heap, int rank,
                                            int device, int num_sms, double timeout) {
    const std::vector<char*> node(fabric.node, fabric.node + heap.topology.ranks_per_node);
    return std::make_unique<CudaLauncher<FabricParams>>(
        heap, fabric, std::vector<int>{rank},
        std::vector<char*>{node[heap.topology.local_of(rank)]}, node, device, num_sms, timeout);
}
template <class FabricParams>
std::unique_ptr<LowLatencyLauncher> low_latency_over(const FabricParams& fabric,
                                                     RankLauncher& launcher,
                                                     const LowLatencyHeap& heap, int blocks) {
    const int local = heap.topology.local_of(launcher.ranks().front());
    return std::make_unique<CudaLowLatencyLauncher<FabricParams>>(
        launcher_of<FabricParams>(launcher), heap, fabric, std::vector<char*>{fabric.node[local]},
        blocks);
}

}  // namespace ep
