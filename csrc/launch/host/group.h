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

namespace ep {

// How the roles of a launch are run.
struct Schedule {
    int threads = 1;  // OS threads, each with the roles of some ranks as fibers
    // One thread, random interleaving, a simulated network between nodes.
    std::optional<uint64_t> seed;
    uint64_t lost_signal = 0;  // with a seed: which signal the network loses
    Stall stall = {};          // with a seed
};

// How a rank reaches the others: all are mapped here; or a network is simulated between nodes; or
// nodes are machines, or are taken for such.
using AnyHostFabric = std::variant<MappedHostFabric, HostFabric, QueueFabric>;

// The ranks of a buffer that live in this process: one, or all of them. A launch runs one phase on
// all of them together.
class HostGroup {
  public:
    // heaps: of all ranks, mapped here. ranks: those that this process runs. nic: carries what goes
    // to other nodes, for the one rank of this process; of ranks on other machines `heaps` then has
    // mirrors of their control blocks.
    HostGroup(const Heap& heap, std::vector<int> ranks, std::vector<char*> heaps, Schedule schedule,
              std::chrono::duration<double> timeout, SoftwareNic* nic = nullptr);
    HostGroup(const HostGroup&) = delete;

    // One argument per rank of this process, in the order of `ranks`. They return when all roles
    // have, for whatever reason: see finished(). `interrupted` is asked from time to time on the
    // calling thread while it waits.
    template <class Warp = HostWarp>
    void notify(std::vector<NotifyArgs> args, const std::function<bool()>& interrupted = {});
    template <class Warp = HostWarp>
    void dispatch(std::vector<DispatchArgs> args, const std::function<bool()>& interrupted = {});
    template <class Warp = HostWarp>
    void combine(std::vector<CombineArgs> args, DType dtype,
                 const std::function<bool()>& interrupted = {});

    const std::vector<int>& ranks() const { return ranks_; }
    const Heap& heap() const { return heap_; }
    // Whether the last launch did all that it had to on the ranks of this process. Another rank may
    // have given up since.
    bool finished() const;
    const RankState& state(size_t index) const { return states_[index]; }
    // [world] of nanoseconds, see Heap: in the last call and in all.
    std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t index) const;
    // Makes every wait of every rank end. The first reason since the last reset is kept for all.
    void abort(Outcome outcome, const std::string& reason);
    // Back to the state of a new buffer. No rank may be in a launch, and none may launch before all
    // have reset.
    void reset();

  private:
    friend class HostLowLatency;

    using Tasks = std::vector<std::vector<RoleTask>>;  // of each rank
    // How the rank reaches the others, of which `heaps` are those of a mode. queues: null where
    // there is no network card.
    AnyHostFabric fabric_of(int rank, const std::vector<char*>& heaps,
                            const HostQueues* queues) const;
    template <class Warp>
    auto adder(Tasks& tasks, size_t index);
    // count(calls, number): where calls of this kind are counted.
    using Count = uint64_t& (*)(Calls& calls, uint64_t number);
    // begins_call: whether the launch is the first of a dispatch or combine.
    // The phases one after the other: on each rank as long as all goes well there.
    void run(Count count, bool begins_call, std::vector<Tasks> phases,
             const std::function<bool()>& interrupted);
    void run_roles(Tasks tasks_of_rank, const std::function<bool()>& interrupted);
    static void begin_transfer(RankState& state, const TransferArgs& args) {
        state.call = args.call;
        state.note_sends(Sends::Mode::Transfer, args);
    }
    static uint64_t& count_transfers(Calls& calls, uint64_t) { return calls.transfer; }
    // The same, and if not all of it was done nobody can take the outputs for data.
    template <class Args>
    void run_to_outputs(Count count, bool begins_call, const std::vector<Args>& args,
                        std::vector<Tasks> phases, const std::function<bool()>& interrupted);

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
