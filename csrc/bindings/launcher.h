#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/args.h"
#include "core/dtypes.h"
#include "core/incident.h"
#include "core/low_latency_args.h"

namespace ep {

// The part of a call that a launch does. The last three belong to the low-latency mode.
enum class Phase : int {
    Notify,               // exchanges counts and waits for them
    Dispatch,             // when the host knows the counts
    DispatchWithoutWait,  // notify and dispatch; the host does not wait for counts
    SpeculativeDispatch,  // notify and dispatch into tensors of a guessed size; the host waits for
                          // counts
    DispatchRetry,        // the dispatch of a SpeculativeDispatch whose guess was wrong
    Combine,
    Send,
    Receive,
    SendAndReceive,
};

inline LowLatencyLaunches halves(Phase phase) {
    const int half = static_cast<int>(phase) - static_cast<int>(Phase::Send);
    if (half < 0) throw std::invalid_argument("a phase of the normal mode");
    return static_cast<LowLatencyLaunches>(half);
}

// The kernels' arguments of a call, one for each rank of this process.
using AllArgs =
    std::variant<std::vector<DispatchCallArgs>, std::vector<CombineArgs>,
                 std::vector<LowLatencyDispatchArgs>, std::vector<LowLatencyCombineArgs>>;

template <class Args>
DType dtype_of(const std::vector<Args>& args) {
    return static_cast<DType>(args.front().format.payload_type);
}

// The result of a launch for which the host waited for counts.
struct Counted {
    std::vector<Layout::Totals> totals;  // one for each rank; empty if the host did not wait
    bool fits = false;                   // whether the guess of a SpeculativeDispatch was right
};

// Refuses a launch of a buffer during another one, because both would use the same rings.
class ExclusiveCall {
  public:
    // Throws std::runtime_error while another thread holds the lock.
    std::unique_lock<std::mutex> enter() {
        std::unique_lock lock(busy_, std::try_to_lock);
        if (!lock) throw std::runtime_error("the buffer is in use by another thread");
        return lock;
    }

  private:
    std::mutex busy_;
};

// Launches the calls of one mode on the ranks of this process.
class Launcher {
  public:
    virtual ~Launcher() = default;
    // Return the arguments of a call whose rows have this format, one for each rank, without
    // tensors.
    virtual AllArgs dispatch_args(const RowFormat& format) const = 0;
    virtual AllArgs combine_args(const RowFormat& format) const = 0;
    // Must be called without the GIL. stream: null on the host.
    virtual Counted launch(Phase phase, AllArgs args, void* stream) = 0;
    virtual void reset() = 0;
};

template <class AnyHeap, class AnyDispatchArgs, class AnyCombineArgs>
class ModeLauncher : public Launcher {
  public:
    AllArgs dispatch_args(const RowFormat& format) const override {
        return blank<AnyDispatchArgs>(format);
    }
    AllArgs combine_args(const RowFormat& format) const override {
        return blank<AnyCombineArgs>(format);
    }
    virtual const AnyHeap& heap() const = 0;
    virtual const std::vector<int>& ranks() const = 0;
    virtual int warps() const { return 0; }  // of a launch of the low-latency mode

  private:
    template <class Args>
    std::vector<Args> blank(const RowFormat& format) const {
        std::vector<Args> args(ranks().size());
        for (size_t i = 0; i < args.size(); ++i) {
            args[i].rank = ranks()[i];
            args[i].heap = heap();
            args[i].format = format;
            if constexpr (std::is_same_v<AnyHeap, LowLatencyHeap>)
                args[i].layout = {heap(), format.topk, warps(), nullptr};
            if constexpr (std::is_same_v<Args, CombineArgs>) args[i].is_combine = true;
        }
        return args;
    }
};

using LowLatencyLauncher =
    ModeLauncher<LowLatencyHeap, LowLatencyDispatchArgs, LowLatencyCombineArgs>;

// Launches the normal mode, and reports failures of all of a buffer's launches. Functions that only
// a GPU needs do nothing on the host.
class RankLauncher : public ModeLauncher<Heap, DispatchCallArgs, CombineArgs> {
  public:
    // Returns the abort word of the first rank to give up that this process knows of; 0: none.
    virtual uint64_t aborted() const = 0;
    virtual const ControlBlock& report(size_t index) const = 0;
    // Calls `show` with the rank and control block of each rank in reach.
    virtual void show_ranks(const std::function<void(int, const ControlBlock&)>& show) = 0;
    // Returns [world] nanoseconds of waiting for each rank: in the last call, and in all calls.
    virtual std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t index) const = 0;
    virtual void abort(Outcome outcome, const std::string& reason) = 0;

    // For the host only: publishes a refused call, whether the last launch finished all its work,
    // and seconds in launches.
    virtual void note_refusal(uint64_t, uint64_t) {}
    virtual bool finished() const { return false; }
    virtual double seconds() const { return 0; }
    // For a GPU only: see CudaGroup.
    virtual std::vector<int64_t> count_times() const { return {}; }
    virtual void listen() {}
    virtual void drain() {}
    virtual void note_capture(void*) {}
    virtual int graphs() const { return 0; }
    virtual bool orders_graphs() const { return true; }
    virtual void retire() {}

    pybind11::object watch = pybind11::none();  // called while counts are waited for, may raise
};

}  // namespace ep
