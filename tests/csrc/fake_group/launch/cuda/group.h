#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "core/args.h"
#include "core/dtypes.h"
#include "core/incident.h"

namespace ep {

using CudaStream = void*;

// A group without a GPU: where the real one has the host wait or work, this one waits at a gate.
template <class Gate>
class CudaGroup {
  public:
    CudaGroup(const Heap& heap, const Gate&, std::vector<int>, const std::vector<char*>&,
              const std::vector<char*>&, int, int, double)
        : heap_(heap) {}

    std::vector<Layout::Totals> notify_and_wait(const std::vector<NotifyArgs>&, CudaStream,
                                                const std::function<void()>& idle,
                                                const std::vector<DispatchArgs>& = {}) {
        Gate::pass();
        idle();
        return {};
    }
    template <class Args>
    void request_reports(std::vector<Args>&) {}
    std::vector<Layout::Totals> wait_for_reports(CudaStream,
                                                 const std::function<void()>& idle) const {
        Gate::pass();
        idle();
        return {{}};
    }
    std::array<std::chrono::steady_clock::time_point, 3> count_times() const {
        using std::chrono::steady_clock, std::chrono::nanoseconds;
        return {steady_clock::time_point(nanoseconds(1)), steady_clock::time_point(nanoseconds(2)),
                steady_clock::time_point(nanoseconds(3))};
    }
    void dispatch(const std::vector<DispatchArgs>&, CudaStream) { Gate::pass(); }
    void dispatch_without_wait(const std::vector<DispatchCallArgs>&, CudaStream) { Gate::pass(); }
    void combine(const std::vector<CombineArgs>&, DType, CudaStream) { Gate::pass(); }
    void drain() const { Gate::pass(); }
    void listen() {}
    void note_capture(CudaStream) {}
    int graphs() const { return 0; }
    bool orders_graphs() const { return true; }
    void retire() {}
    void reset() { Gate::pass(); }

    uint64_t aborted() const { return 0; }
    void abort(Outcome, const std::string&) {}
    std::vector<ControlBlock> control_blocks() const { return {}; }
    int first_in_reach() const { return 0; }
    std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t) const { return {}; }
    const ControlBlock& report(size_t) const { return report_; }
    const std::vector<int>& ranks() const { return ranks_; }
    const Heap& heap() const { return heap_; }

  private:
    std::vector<int> ranks_{0};
    Heap heap_;
    ControlBlock report_{};
};

}  // namespace ep
