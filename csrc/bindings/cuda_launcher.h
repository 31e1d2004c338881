#pragma once

#include <memory>
#include <utility>

#include "bindings/launcher.h"
#include "core/cuda/deferred_release.h"
#include "launch/channel_roles.h"
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
        : RankLauncher(heap, ranks),
          group_(heap, fabric, std::move(ranks), own_heaps, heaps, device, num_sms, timeout) {}

    Counted launch(Phase phase, AllArgs args, void* stream) override {
        const auto lock = enter();
        if (phase == Phase::Combine) {
            auto& all = std::get<std::vector<CombineArgs>>(args);
            ++call_;
            number(all);
            group_.combine(all, dtype_of(all), stream);
            return {};
        }
        auto& all = std::get<std::vector<DispatchCallArgs>>(args);
        if (phase == Phase::Notify) return {group_.notify_and_wait(all, false, stream, idle())};
        if (phase == Phase::SpeculativeDispatch && all.size() > 1)
            throw std::invalid_argument(
                "a dispatch ahead is for one rank: each of several would "
                "decide for itself");
        if (phase != Phase::DispatchRetry) ++call_;
        number(all);
        if (phase == Phase::DispatchWithoutWait) {
            group_.dispatch_without_wait(all, stream);
            return {};
        }
        if (phase == Phase::SpeculativeDispatch) {
            auto totals = group_.notify_and_wait(all, true, stream, idle());
            const bool fits = totals.empty() || all.front().fits(totals.front());
            return {std::move(totals), fits};
        }
        group_.dispatch({all.begin(), all.end()}, stream);
        return {};
    }

    CudaGroup<FabricParams>& group() override { return group_; }
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
    void reset() override {
        const auto lock = enter();
        group_.reset();
        call_ = 0;
    }

  private:
    CudaGroup<FabricParams> group_;
};

template <class FabricParams>
class CudaLowLatencyLauncher : public LowLatencyLauncher {
  public:
    CudaLowLatencyLauncher(CudaLauncher<FabricParams>& launcher, const LowLatencyHeap& heap,
                           const FabricParams& fabric, const std::vector<char*>& own_heaps,
                           int blocks)
        : LowLatencyLauncher(heap, launcher.ranks(), blocks * kBlockWarps),
          launcher_(launcher),
          ranks_(launcher.group(), heap, fabric, own_heaps, blocks) {}

    Counted launch(Phase phase, AllArgs args, void* stream) override {
        const LowLatencyLaunches launches = halves(phase);
        if (auto* dispatches = std::get_if<std::vector<LowLatencyDispatchArgs>>(&args)) {
            const bool waits = dispatches->front().host_waits && receives(launches);
            if (waits) launcher_.group().request_reports(*dispatches);
            ranks_.dispatch(launches, *dispatches, stream);
            if (!waits) return {};
            return {launcher_.group().wait_for_reports(stream, launcher_.idle())};
        }
        const auto& combines = std::get<std::vector<LowLatencyCombineArgs>>(args);
        ranks_.combine(launches, combines, dtype_of(combines), stream);
        return {};
    }
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
