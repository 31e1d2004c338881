#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/args.h"
#include "exec/host/fibers.h"
#include "exec/host/host_warp.h"
#include "fabric/host_fabric.h"
#include "fabric/queue/host_queues.h"
#include "launch/rank_group.h"

namespace ep {

// How a group runs the roles of a launch.
struct Schedule {
    int threads = 1;  // OS threads, each with the roles of some ranks as fibers
    // Runs all roles on one thread in a random order, with a simulated network between nodes.
    std::optional<uint64_t> seed;
    uint64_t lost_signal = 0;  // with a seed: number of the signal that the network loses
    Stall stall = {};          // with a seed
};

// How a rank reaches the others: by memory that is mapped here, over a simulated network between
// nodes, or by send queues, which SoftwareNic carries out.
using AnyHostFabric = std::variant<MappedHostFabric, HostFabric, QueueFabric>;

// The ranks of a buffer that live in this process, on the host: one rank, or all. A launch runs one
// phase on all of them together.
class HostGroup : public RankGroup {
  public:
    // heaps: by rank, all mapped here. ranks: those that this process runs. nic: null, or what
    // sends to other nodes for the one rank of this process; for ranks on other machines `heaps`
    // then has mirrors of their control blocks.
    HostGroup(const Heap& heap, std::vector<int> ranks, std::vector<char*> heaps, Schedule schedule,
              std::chrono::duration<double> timeout, SoftwareNic* nic = nullptr);
    HostGroup(const HostGroup&) = delete;

    // All launches take one argument per rank of this process, in the order of `ranks`, and return
    // when all roles have ended, for whatever reason: see finished(). They call `interrupted` from
    // time to time on the calling thread; if it returns true, the waits end. A notify with invalid
    // ids on a rank of this process is not entered: see Layout::Totals.
    template <class Warp = HostWarp>
    void notify(std::vector<NotifyArgs> args, const std::function<bool()>& interrupted = {});
    template <class Warp = HostWarp>
    void dispatch(std::vector<DispatchArgs> args, const std::function<bool()>& interrupted = {});
    template <class Warp = HostWarp>
    void combine(std::vector<CombineArgs> args, DType dtype,
                 const std::function<bool()>& interrupted = {});

    const std::vector<int>& ranks() const { return ranks_; }
    const RankState& state(size_t index) const { return states_[index]; }
    uint64_t aborted() const override;
    const ControlBlock& report(size_t index) const override { return *states_[index].control; }
    std::vector<ControlBlock> control_blocks() const override;
    std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t index) const override;
    void abort(Outcome outcome, const std::string& reason) override;
    void note_refusal(uint64_t number, uint64_t word) override;
    bool finished() const override;
    // Restores the state of a new buffer. No rank may be in a launch until all have reset.
    void reset();

  private:
    friend class HostLowLatency;

    using Tasks = std::vector<std::vector<RoleTask>>;  // by rank
    // Makes the rank's fabric over the heaps of one mode, by rank. queues: null without a nic.
    AnyHostFabric fabric_of(int rank, const std::vector<char*>& heaps,
                            const HostQueues* queues) const;
    template <class Warp>
    auto adder(Tasks& tasks, size_t index);
    // The counter of a kind of calls.
    using Count = uint64_t Calls::*;
    // Runs the phases in turn. A rank on which one fails skips the later ones. enters, finishes:
    // null where this is not the first, or not the last launch of a call. begins_call: whether it
    // is the first one, from which Heap::waited_before counts.
    void run(Count enters, Count finishes, bool begins_call, std::vector<Tasks> phases,
             const std::function<bool()>& interrupted);
    void run_roles(Tasks tasks_of_rank, const std::function<bool()>& interrupted);
    static void begin_transfer(RankState& state, const TransferArgs& args) {
        state.call = state.next(&Calls::transfer);
        state.note_sends(Sends::Mode::Transfer, args);
    }
    // Does what run does. If it did not finish, fills the outputs with Outputs::kPoison.
    template <class Args>
    void run_to_outputs(Count enters, Count finishes, bool begins_call,
                        const std::vector<Args>& args, std::vector<Tasks> phases,
                        const std::function<bool()>& interrupted);

    Heap heap_;
    std::vector<int> ranks_;
    std::vector<RankState> states_;
    std::vector<AnyHostFabric> fabrics_;
    std::vector<char*> own_heaps_;
    SoftwareNic* nic_;
    std::unique_ptr<HostQueues> queues_;
    Schedule schedule_;
    std::unique_ptr<SimulatedNetwork> network_;
    std::unique_ptr<SeededExecutor> seeded_;
    std::vector<std::unique_ptr<FiberExecutor>> executors_;
    std::atomic<bool> has_reason_ = false;
};

}  // namespace ep
