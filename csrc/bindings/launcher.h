#pragma once

#include <pybind11/pybind11.h>

#include <exception>
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
#include "launch/rank_group.h"

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
    // warps: of a launch of the low-latency mode.
    ModeLauncher(const AnyHeap& heap, std::vector<int> ranks, int warps = 0)
        : heap_(heap), ranks_(std::move(ranks)), warps_(warps) {}

    AllArgs dispatch_args(const RowFormat& format) const override {
        return blank<AnyDispatchArgs>(format);
    }
    AllArgs combine_args(const RowFormat& format) const override {
        return blank<AnyCombineArgs>(format);
    }
    const std::vector<int>& ranks() const { return ranks_; }
    int warps() const { return warps_; }

  private:
    template <class Args>
    std::vector<Args> blank(const RowFormat& format) const {
        std::vector<Args> args(ranks_.size());
        for (size_t i = 0; i < args.size(); ++i) {
            args[i].rank = ranks_[i];
            args[i].heap = heap_;
            args[i].format = format;
            if constexpr (std::is_same_v<AnyHeap, LowLatencyHeap>)
                args[i].layout = {heap_, format.topk, warps_, nullptr};
            if constexpr (std::is_same_v<Args, CombineArgs>) args[i].is_combine = true;
        }
        return args;
    }

    const AnyHeap heap_;
    const std::vector<int> ranks_;
    const int warps_;
};

using LowLatencyLauncher =
    ModeLauncher<LowLatencyHeap, LowLatencyDispatchArgs, LowLatencyCombineArgs>;

// Another thread is in a call of the same buffer. Python raises BusyError of megatron_ep/errors.py.
struct BusyError : std::exception {};

// Launches the normal mode.
class RankLauncher : public ModeLauncher<Heap, DispatchCallArgs, CombineArgs> {
  public:
    using ModeLauncher::ModeLauncher;

    // What launches of both modes run on.
    virtual RankGroup& group() = 0;
    virtual double seconds() const { return 0; }  // in launches, on the host

    pybind11::object watch = pybind11::none();  // called while counts are waited for, may raise

  protected:
    // Refuses a launch of a buffer during another one, because both would use the same rings:
    // throws BusyError while another thread holds the lock.
    std::unique_lock<std::mutex> enter() {
        std::unique_lock lock(busy_, std::try_to_lock);
        if (!lock) throw BusyError();
        return lock;
    }
    template <class Args>
    void number(std::vector<Args>& args) const {
        for (Args& a : args) a.call = call_;
    }

    uint64_t call_ = 0;  // the last one

  private:
    std::mutex busy_;
};

}  // namespace ep
