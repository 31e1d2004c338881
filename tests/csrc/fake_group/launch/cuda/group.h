#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/args.h"
#include "core/dtypes.h"
#include "core/incident.h"
#include "launch/rank_group.h"

namespace ep {

using CudaStream = void*;

// A group without a GPU: where the real one has the host wait or work, this one waits at a gate.
template <class Gate>
class CudaGroup : public RankGroup {
  public:
    CudaGroup(const Heap&, const Gate&, std::vector<int>, const std::vector<char*>&,
              const std::vector<char*>&, int, int, double) {}

    std::vector<Layout::Totals> notify_and_wait(const std::vector<DispatchCallArgs>&, bool,
                                                CudaStream, const std::function<void()>& idle) {
        Gate::pass();
        idle();
        return {{}};
    }
    template <class Args>
    void request_reports(std::vector<Args>&) {}
    std::vector<Layout::Totals> wait_for_reports(CudaStream,
                                                 const std::function<void()>& idle) const {
        Gate::pass();
        idle();
        return {{}};
    }
    void dispatch(const std::vector<DispatchArgs>&, CudaStream) { Gate::pass(); }
    void dispatch_without_wait(const std::vector<DispatchCallArgs>&, CudaStream) { Gate::pass(); }
    void combine(const std::vector<CombineArgs>&, DType, CudaStream) { Gate::pass(); }
    void drain() const override { Gate::pass(); }
    void reset() { Gate::pass(); }

    uint64_t aborted() const override { return 0; }
    void abort(Outcome, const std::string&) override {}
    std::vector<ControlBlock> control_blocks() const override { return {}; }
    std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t) const override {
        return {};
    }
    const ControlBlock& report(size_t) const override { return report_; }

  private:
    ControlBlock report_{};
};

}  // namespace ep
