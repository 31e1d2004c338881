#pragma once

#include <chrono>
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

namespace ep {

// The ranks of a buffer that live in this process, all on one GPU. One launch runs a phase for all
// of them, with the blocks of all ranks on the GPU at once. Launches only enqueue: aborted() shows
// a failure, at the latest when the kernels have ended. FabricParams is the kernel parameter with
// which ranks reach each other (see launch/cuda/launch_params.h).
template <class FabricParams>
class CudaGroup {
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
    // Launches notify and waits for the totals of each rank, which are zeros if the rank gave up
    // first. Calls `idle` from time to time, which may throw. Throws std::runtime_error if the GPU
    // fails. speculative: a dispatch to launch before the wait; empty: none.
    std::vector<Layout::Totals> notify_and_wait(std::vector<NotifyArgs> args, CudaStream stream,
                                                const std::function<void()>& idle,
                                                const std::vector<DispatchArgs>& speculative = {});
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
    // When the last notify_and_wait had launched notify and the dispatch behind it, and saw the
    // counts.
    const auto& count_times() const { return count_times_; }
    void dispatch(const std::vector<DispatchArgs>& args, CudaStream stream);
    // Launches notify and dispatch without waiting for the counts, as one kernel where possible.
    void dispatch_without_wait(const std::vector<DispatchCallArgs>& args, CudaStream stream);
    void combine(const std::vector<CombineArgs>& args, DType dtype, CudaStream stream);

    const std::vector<int>& ranks() const { return ranks_; }
    const Heap& heap() const { return heap_; }
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
    uint64_t aborted() const;
    const ControlBlock& report(size_t index) const { return reports_[index]; }
    // Ends the waits of all ranks in reach, also while kernels run. A rank that has aborted keeps
    // its abort word, but if several processes abort at once, the last word stays. Thread-safe.
    void abort(Outcome outcome, const std::string& reason);
    // [world] nanoseconds of waiting in the last call, and in all calls: see Heap::waited.
    std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t index) const;
    // Returns copies of the control blocks of the ranks in reach, from first_in_reach() on.
    std::vector<ControlBlock> control_blocks() const;
    int first_in_reach() const { return first_in_reach_; }
    // Makes aborted() include ranks that gave up while no kernel of this process ran. Thread-safe.
    void listen();
    // Waits until what this process's ranks sent to other nodes has arrived. Throws
    // std::runtime_error after the timeout.
    void drain() const;
    // Counts the graph of a stream that is being captured, before launches on it: see graphs().
    void note_capture(CudaStream stream) { graphs_.note(stream); }
    // How many CUDA graphs may replay launches of this process's ranks, whose memory must stay.
    int graphs() const { return graphs_.alive(); }
    // Whether combine may have an intra-rank pass in a graph: see SideStream.
    bool orders_graphs() const { return SideStream::orders_graphs(); }
    // Waits for all launches. Replays from now on do not use other ranks' memory, and fill their
    // outputs with Outputs::kPoison.
    void retire();
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
    std::chrono::steady_clock::time_point count_times_[3];
};

}  // namespace ep
