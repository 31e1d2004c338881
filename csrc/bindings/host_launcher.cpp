#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "bindings/launcher.h"
#include "bindings/module.h"
#include "fabric/shared_memory.h"
#include "launch/host/group.h"
#include "launch/host/low_latency.h"

namespace py = pybind11;

namespace ep {
namespace {

// Checks for signals every 50 ms. Returns true after Ctrl-C, with Python's KeyboardInterrupt set.
class SignalCheck {
  public:
    bool operator()() {
        const auto now = std::chrono::steady_clock::now();
        if (now < next_) return false;
        next_ = now + std::chrono::milliseconds(50);
        py::gil_scoped_acquire gil;
        return PyErr_CheckSignals() != 0;
    }

  private:
    std::chrono::steady_clock::time_point next_ =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
};

std::vector<char*> data_of(const std::vector<Segment*>& segments) {
    std::vector<char*> data;
    for (const Segment* segment : segments) data.push_back(segment->data());
    return data;
}

class HostLauncher : public RankLauncher {
  public:
    HostLauncher(const Heap& heap, std::vector<int> ranks, const std::vector<Segment*>& segments,
                 const Schedule& schedule, double timeout, SoftwareNic* nic)
        : RankLauncher(heap, ranks),
          group_(heap, std::move(ranks), data_of(segments), schedule,
                 std::chrono::duration<double>(timeout), nic) {}

    // A fused dispatch is a notify and a dispatch here, so it has totals, too.
    Counted launch(Phase phase, AllArgs args, void*) override {
        const auto lock = enter();
        if (phase == Phase::Combine) {
            auto& all = std::get<std::vector<CombineArgs>>(args);
            ++call_;
            number(all);
            timed(
                [&](const auto& interrupted) { group_.combine(all, dtype_of(all), interrupted); });
            return {};
        }
        auto& all = std::get<std::vector<DispatchCallArgs>>(args);
        Counted counted;
        if (phase != Phase::Dispatch && phase != Phase::DispatchRetry) {
            counted.totals = notify(all);
            const Layout::Totals& first = counted.totals.front();
            counted.fits = phase == Phase::SpeculativeDispatch && all.front().fits(first);
            const bool goes_on = counted.fits || phase == Phase::DispatchWithoutWait;
            if (!goes_on || is_refused(counted.totals) || group_.aborted()) return counted;
        }
        ++call_;
        number(all);
        timed([&](const auto& interrupted) {
            group_.dispatch({all.begin(), all.end()}, interrupted);
        });
        return counted;
    }
    // Runs a launch of the low-latency mode, which shares the group's threads.
    template <class F>
    void launch_alone(F&& f) {
        const auto lock = enter();
        timed(f);
    }

    HostGroup& group() override { return group_; }
    double seconds() const override { return seconds_.count(); }
    void reset() override {
        const auto lock = enter();
        group_.reset();
        epoch_ = call_ = 0;
    }

  private:
    std::vector<Layout::Totals> notify(const std::vector<DispatchCallArgs>& dispatches) {
        std::vector<NotifyArgs> args;
        for (const DispatchCallArgs& dispatch : dispatches) {
            args.push_back(dispatch.notify(epoch_ + 1));
            args.back().layout.totals() = {};
        }
        timed([&](const auto& interrupted) { group_.notify(args, interrupted); });
        std::vector<Layout::Totals> totals;
        for (const NotifyArgs& a : args) totals.push_back(a.layout.totals());
        if (!is_refused(totals)) ++epoch_;
        return totals;
    }

    // Whether a rank's ids are invalid, so that the exchange was not entered.
    static bool is_refused(const std::vector<Layout::Totals>& totals) {
        return std::ranges::any_of(totals, [](const auto& rank) { return rank.bad_token; });
    }

    template <class F>
    void timed(F&& f) {
        const auto start = std::chrono::steady_clock::now();
        SignalCheck check;
        f(std::function<bool()>(std::ref(check)));
        seconds_ += std::chrono::steady_clock::now() - start;
    }

    HostGroup group_;
    uint64_t epoch_ = 0;
    std::chrono::duration<double> seconds_{0};
};

class HostLowLatencyLauncher : public LowLatencyLauncher {
  public:
    HostLowLatencyLauncher(HostLauncher& launcher, const LowLatencyHeap& heap,
                           const std::vector<Segment*>& segments, int warps)
        : LowLatencyLauncher(heap, launcher.ranks(), warps),
          launcher_(launcher),
          ranks_(launcher.group(), heap, data_of(segments), warps) {}

    Counted launch(Phase phase, AllArgs args, void*) override {
        const LowLatencyLaunches launches = halves(phase);
        Counted counted;
        launcher_.launch_alone([&](const auto& interrupted) {
            if (auto* all = std::get_if<std::vector<LowLatencyDispatchArgs>>(&args)) {
                if (receives(launches) && all->front().host_waits)
                    counted.totals.resize(all->size());
                for (size_t i = 0; i < counted.totals.size(); ++i)
                    (*all)[i].report.totals = &counted.totals[i];
                ranks_.dispatch(launches, *all, interrupted);
            } else {
                const auto& combines = std::get<std::vector<LowLatencyCombineArgs>>(args);
                ranks_.combine(launches, combines, dtype_of(combines), interrupted);
            }
        });
        return counted;
    }
    void reset() override { ranks_.reset(); }

  private:
    HostLauncher& launcher_;
    HostLowLatency ranks_;
};

}  // namespace

void bind_host_launcher(py::module_& m) {
    m.def(
        "host_launcher",
        [](const Heap& heap, std::vector<int> ranks, const std::vector<Segment*>& segments,
           int threads, std::optional<uint64_t> seed, uint64_t lost_signal,
           const std::pair<int, uint64_t>& stalled, double timeout,
           SoftwareNic* nic) -> std::unique_ptr<RankLauncher> {
            const Schedule schedule{threads, seed, lost_signal, {stalled.first, stalled.second}};
            return std::make_unique<HostLauncher>(heap, std::move(ranks), segments, schedule,
                                                  timeout, nic);
        },
        py::kw_only(), py::arg("heap"), py::arg("ranks"), py::arg("segments"), py::arg("threads"),
        py::arg("seed"), py::arg("lost_signal"), py::arg("stalled"), py::arg("timeout"),
        py::arg("nic") = nullptr, py::keep_alive<0, 3>(), py::keep_alive<0, 9>());
    m.def(
        "host_low_latency",
        [](RankLauncher& launcher, const LowLatencyHeap& heap,
           const std::vector<Segment*>& segments,
           int warps) -> std::unique_ptr<LowLatencyLauncher> {
            return std::make_unique<HostLowLatencyLauncher>(dynamic_cast<HostLauncher&>(launcher),
                                                            heap, segments, warps);
        },
        py::kw_only(), py::arg("launcher"), py::arg("heap"), py::arg("segments"), py::arg("warps"),
        py::keep_alive<0, 1>(), py::keep_alive<0, 3>());
}

}  // namespace ep
