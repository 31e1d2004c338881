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
#include "launch/cuda/joint.h"
#include "launch/cuda/resource.h"
#include "launch/cuda/side_stream.h"

namespace ep {

// The SMs of a GPU, and what fits on them.
struct CudaDevice {
    int sms;
    int major;
    int minor;

    static CudaDevice of(int device);
};

// The ranks of a buffer that live in this process, on one GPU. A launch runs one phase on all of
// them together: its blocks are the blocks of all ranks, all on the GPU at once. Launches only
// enqueue; whether they failed shows in aborted(), at the latest when they are done. FabricParams:
// how they reach the other ranks, a kernel parameter (see launch/cuda/joint.h).
template <class FabricParams>
class CudaGroup {
    static_assert(FabricParamsLike<FabricParams>);

  public:
    // heaps: of those ranks whose memory this process can write, all of them or those of the node,
    // in their order; own_heaps: of `ranks`, in theirs. sms: how many SMs a launch may use for each
    // rank.
    CudaGroup(const Heap& heap, const FabricParams& fabric, std::vector<int> ranks,
              const std::vector<char*>& own_heaps, const std::vector<char*>& heaps, int device,
              int sms, double timeout);
    CudaGroup(const CudaGroup&) = delete;

    // One argument per rank of this process, in the order of `ranks`. Args of notify need no epoch:
    // it is counted on the GPU.
    //
    // Waits for the totals of each rank; zeros for a rank that gave up before it knew any. Now and
    // then it calls `idle`, which may throw. Throws std::runtime_error when the GPU fails. ahead: a
    // dispatch that is launched before the wait; none: empty.
    std::vector<Layout::Totals> notify_and_wait(std::vector<NotifyArgs> args, CudaStream stream,
                                                const std::function<void()>& idle,
                                                const std::vector<DispatchArgs>& ahead = {});
    void dispatch(const std::vector<DispatchArgs>& args, CudaStream stream);
    // Both for a host that does not wait for the counts: one launch between ranks of one node.
    void fused_dispatch(const std::vector<FusedDispatchArgs>& args, CudaStream stream);
    void combine(const std::vector<CombineArgs>& args, DType dtype, CudaStream stream);

    const std::vector<int>& ranks() const { return ranks_; }
    const Heap& heap() const { return heap_; }
    const FabricParams& fabric() const { return fabric_; }
    int device() const { return device_; }
    uint64_t timeout_ns() const { return timeout_ns_; }
    // What the kernels of the rank at `index` need to wait and to give up.
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
    // Makes the waits of all ranks in reach end, also while this process's own kernels run, unless
    // they have ended: then the reason that they were given stays. From any thread. Of several
    // processes whose hosts do so in the same moment the last is remembered.
    void abort(Outcome outcome, const std::string& reason);
    // [world] of nanoseconds, see Heap: in the last call and in all, of waits that lasted.
    std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t index) const;
    // Of the ranks in reach, from first_in_reach() on.
    std::vector<ControlBlock> control_blocks() const;
    int first_in_reach() const { return first_in_reach_; }
    // From any thread. Afterwards aborted() knows also of those who gave up while no kernel of this
    // process ran.
    void listen();
    // Until what this process's ranks sent to other nodes is there. Throws std::runtime_error when
    // that takes longer than a wait may.
    void drain() const;
    // Before launches on a stream that is being captured: see graphs().
    void note_capture(CudaStream stream) { graphs_.note(stream); }
    // How many CUDA graphs may replay launches of this process's ranks. What those use must stay.
    int graphs() const { return graphs_.alive(); }
    // Whether combine may have an intra-rank pass in a graph: see SideStream.
    bool orders_graphs() const { return SideStream::orders_graphs(); }
    // Once all launches are done: whatever is replayed from now on uses no other rank's memory, and
    // fills its outputs with what nobody can take for data.
    void retire();
    // Back to the state of a new buffer, once nothing runs and all ranks have drained.
    void reset();

  private:
    void load_kernels() const;
    void notify(const std::vector<NotifyArgs>& args, CudaStream stream);
    void hear(const std::vector<ControlBlock*>& blocks);
    void hear_own();
    template <class F>
    void for_local_ranks(F&& f) const;
    template <class J, class Args>
    J joint(const std::vector<Args>& args, int blocks_per_rank) const;
    // The same on all SMs of the group, whose warps are dealt to a dispatch's or combine's roles.
    template <class J, class Args>
    J joint_of_roles(const std::vector<Args>& args) const;

    // Of a rank's heap, how much lies on the GPU.
    size_t bytes_on_gpu() const {
        return FabricParams::kOverHost ? heap_.bytes_without_network() : heap_.bytes();
    }
    size_t progress_bytes() const { return ranks_.size() * Progress::kWords * sizeof(uint64_t); }

    Heap heap_;
    FabricParams fabric_;
    std::vector<int> ranks_;
    std::vector<char*> own_heaps_;
    int device_;
    int sms_;
    SideStream side_stream_;
    uint64_t timeout_ns_;
    std::vector<ControlBlock*> reachable_;  // of the heaps
    int first_in_reach_;
    std::mutex abort_mutex_;  // for what abort and listen pass through
    bool has_reason_ = false;
    Resource<void> abort_stream_;
    Resource<uint64_t*[]> abort_words_;        // of reachable_, on the GPU
    Resource<uint64_t[]> progress_;            // of each rank, on the GPU: see Progress
    Resource<Layout::Totals[]> totals_;        // [ranks], pinned: what notify tells the host
    Layout::Totals* totals_on_gpu_ = nullptr;  // the same, mapped
    uint64_t ticket_ = 0;                      // of the last notify that the host waited for
    Resource<ControlBlock[]> own_reports_;     // unless the fabric has one
    ControlBlock* reports_ = nullptr;          // [ranks], pinned
    ControlBlock* reports_on_gpu_ = nullptr;   // the same, mapped
    Resource<Reason[]> reason_source_;         // one, pinned
    Resource<uint32_t[]> abort_source_;        // one, pinned
    Resource<uint64_t[]> heard_;               // [heaps], pinned
    CudaGraphs graphs_;
};

}  // namespace ep
