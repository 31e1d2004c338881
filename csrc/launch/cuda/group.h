#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/args.h"
#include "core/dtypes.h"
#include "exec/device/device_rank.h"
#include "fabric/fabric.h"
#include "launch/cuda/graphs.h"
#include "launch/cuda/launch_params.h"
#include "launch/cuda/resource.h"
#include "launch/cuda/side_stream.h"
#include "launch/rank_group.h"

namespace ep {

// The ranks of a buffer that live in this process, all on one GPU. One launch runs a phase for all
// of them, with the blocks of all ranks on the GPU at once. Launches only enqueue: aborted() shows
// a failure, at the latest when the kernels have ended. FabricParams is the kernel parameter with
// which ranks reach each other (see launch/cuda/launch_params.h).
template <class FabricParams>
class CudaGroup : public RankGroup {
    static_assert(FabricParamsLike<FabricParams>);

  public:
    // heaps: those that this process can write, by rank: of all ranks, or of this node's ranks.
    // own_heaps: in the order of `ranks`. sms: SMs that a launch may use for each rank. timeout: in
    // seconds.
    CudaGroup(const Heap& heap, const FabricParams& fabric, std::vector<int> ranks,
              const std::vector<char*>& own_heaps, const std::vector<char*>& heaps, int device,
              int sms, double timeout);
    CudaGroup(const CudaGroup&) = delete;

    // All launches take one argument per rank of this process, in the order of `ranks`. The GPU
    // counts the epochs of notify, so its arguments need none.
    //
    // Launches notify, and `ahead` of the counts the dispatch behind it, too; then waits for the
    // totals of each rank, which are zeros if the rank gave up first. Calls `idle` from time to
    // time, which may throw. Throws std::runtime_error if the GPU fails.
    std::vector<Layout::Totals> notify_and_wait(const std::vector<DispatchCallArgs>& args,
                                                bool ahead, CudaStream stream,
                                                const std::function<void()>& idle);
    // Makes the kernels of the next launch report the totals of each rank. Defined here for the
    // arguments of other modes, too.
    template <class Args>
    void request_reports(std::vector<Args>& args) {
        ++ticket_;
        for (size_t i = 0; i < args.size(); ++i) args[i].report = {totals_on_gpu_ + i, ticket_};
    }
    // Waits for these reports as notify_and_wait does.
    std::vector<Layout::Totals> wait_for_reports(CudaStream stream,
                                                 const std::function<void()>& idle);
    void dispatch(const std::vector<DispatchArgs>& args, CudaStream stream);
    // Launches notify and dispatch without waiting for the counts, as one kernel where possible.
    void dispatch_without_wait(const std::vector<DispatchCallArgs>& args, CudaStream stream);
    void combine(const std::vector<CombineArgs>& args, DType dtype, CudaStream stream);

    const std::vector<int>& ranks() const { return ranks_; }
    const FabricParams& fabric() const { return fabric_; }
    int device() const { return device_; }
    uint64_t timeout_ns() const { return timeout_ns_; }
    // Returns what the kernels of the rank at `index` need to wait and to give up.
    DeviceRank device_rank(size_t index) const {
        return {ranks_[index],
                static_cast<int>(reachable_.size()),
                timeout_ns_,
                reinterpret_cast<ControlBlock*>(own_heaps_[index] + heap_.control()),
                reports_on_gpu_ + index,
                abort_words_.get(),
                reinterpret_cast<uint64_t*>(own_heaps_[index] + heap_.waited()),
                FabricParams::kOverHost};
    }
    uint64_t aborted() const override;
    const ControlBlock& report(size_t index) const override { return reports_[index]; }
    std::vector<ControlBlock> control_blocks() const override;
    int first_in_reach() const override { return first_in_reach_; }
    std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t index) const override;
    // A rank that has aborted keeps its abort word, but if several processes abort at once, the
    // last word stays.
    void abort(Outcome outcome, const std::string& reason) override;
    void listen() override;
    void drain() const override;
    void note_capture(CudaStream stream) override { graphs_.note(stream); }
    int graphs() const override { return graphs_.alive(); }
    bool orders_graphs() const override { return SideStream::orders_graphs(); }
    void retire() override;
    // Restores the state of a new buffer. Nothing may run, and all ranks must have drained.
    void reset();

  private:
    void load_kernels() const;
    void notify(const std::vector<NotifyArgs>& args, CudaStream stream);
    void fetch_abort_words(const std::vector<ControlBlock*>& blocks);
    void fetch_own_abort_words();
    template <class F>
    void for_local_ranks(F&& f) const;
    template <class L, class Args>
    L params(const std::vector<Args>& args, int blocks_per_rank) const;
    // Makes the parameters of a launch of dispatch or combine, whose roles share all SMs of the
    // group.
    template <class L, class Args>
    L params_of_roles(const std::vector<Args>& args) const;

    // Bytes of a rank's heap that lie on the GPU.
    size_t bytes_on_gpu() const {
        return FabricParams::kOverHost ? heap_.bytes_without_network() : heap_.bytes();
    }

    Heap heap_;
    FabricParams fabric_;
    std::vector<int> ranks_;
    std::vector<char*> own_heaps_;
    int device_;
    int sms_;
    SideStream side_stream_;
    uint64_t timeout_ns_;
    std::vector<ControlBlock*> reachable_;  // control blocks of the heaps
    int first_in_reach_;
    std::mutex abort_mutex_;  // guards the memory that abort and listen copy through
    bool has_reason_ = false;
    Resource<void> abort_stream_;
    Resource<uint64_t*[]> abort_words_;        // addresses in reachable_, on the GPU
    Resource<uint64_t[]> progress_;            // [ranks], on the GPU: see Progress
    Resource<Layout::Totals[]> totals_;        // [ranks], pinned: reports to the host
    Layout::Totals* totals_on_gpu_ = nullptr;  // the GPU's address of totals_
    uint64_t ticket_ = 0;                      // number of the last request_reports
    Resource<ControlBlock[]> own_reports_;     // empty if the fabric has the report
    ControlBlock* reports_ = nullptr;          // [ranks], pinned
    ControlBlock* reports_on_gpu_ = nullptr;   // the GPU's address of reports_
    Resource<Reason[]> reason_source_;         // one, pinned
    Resource<uint32_t[]> abort_source_;        // one, pinned
    Resource<uint64_t[]> fetched_;             // [heaps], pinned
    CudaGraphs graphs_;
};

}  // namespace ep
