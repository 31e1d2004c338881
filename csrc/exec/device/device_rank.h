#pragma once

#include <cstdint>

#include "core/incident.h"
#if defined(__CUDACC__)
#include "exec/device/ptx.h"
#endif

namespace ep {

// What the warps of a rank need in order to wait, to give up and to report it.
struct DeviceRank {
    int rank;
    int num_reachable;
    uint64_t timeout_ns;  // of each wait
    // Lies in the rank's heap. Waits poll `abort`; the count gives incidents their place.
    ControlBlock* control;
    // Lies in host memory: what the host sees of them, during a kernel and after.
    ControlBlock* report;
    uint64_t** abort_words;  // of the ranks whose memory this one can write, itself included
    uint64_t* waited;        // [world], ns, see Heap
    // Whether the report's abort word ends waits, too: the host hears of ranks on other machines.
    bool polls_report;
};

#if defined(__CUDACC__)

// Reports the abort word by a store, because not every bus has atomics on host memory: all writers
// of the word give the same reason.
EP_FN void report_abort(const DeviceRank& rank) {
    ptx::store_release_sys(&rank.report->abort, ptx::load_acquire_sys(&rank.control->abort));
}

// Ends all waits of all reachable ranks as the word says. Called by one thread.
EP_FN void abort_all(const DeviceRank& rank, uint64_t word) {
    for (int i = 0; i < rank.num_reachable; ++i)
        ptx::compare_and_swap_release_sys(rank.abort_words[i], 0, word);
}

// Whether the host has heard that a rank gave up, which is then passed on. Not inlined: every wait
// would pay for it with registers.
__device__ __noinline__ inline bool host_aborted(const DeviceRank& rank) {
    const uint64_t word = ptx::load_acquire_sys(&rank.report->abort);
    if (word) abort_all(rank, word);
    return word != 0;
}

// Whether a rank gave up. Called from time to time by a lane that waits.
EP_FN bool has_ended(const DeviceRank& rank) {
    return ptx::load_acquire_sys(&rank.control->abort) || (rank.polls_report && host_aborted(rank));
}

// Completes an incident with the buffer's number of the call, which no argument of a launch can
// hold, because a captured one is replayed; and with the role in one hop. Launches follow each
// other, so a call is the first one that has not finished.
EP_FN void name_call(const ControlBlock& control, Incident& incident) {
    const auto entered = [&](uint64_t Calls::* of) {
        return ptx::load_acquire_sys(&(control.entered.*of));
    };
    const auto finished = [&](uint64_t Calls::* of) {
        return ptx::load_acquire_sys(&(control.finished.*of));
    };
    const bool is_hop = incident.role > kLastOfTransfers;
    if (is_hop && entered(&Calls::transfer) == finished(&Calls::transfer)) {
        const bool is_dispatch = incident.role <= Role::LowLatencyReceiver;
        const auto sent = is_dispatch ? &Calls::dispatch_sent : &Calls::combine_sent;
        const auto received = is_dispatch ? &Calls::dispatch_received : &Calls::combine_received;
        const uint64_t number = entered(received);
        incident.call = number != finished(received) ? number : finished(sent) + 1;
    } else if (incident.role >= Role::NvlSender) {
        incident.call = finished(&Calls::transfer) + 1;
        if (is_hop) incident.role = in_one_hop(incident.role);
    }
}

// Ends all waits of all reachable ranks, with CutOff those of this one alone, and tells the host.
// Called by one thread. A rank that finds the abort word can read the incident.
__device__ __noinline__ inline void give_up(const DeviceRank& rank, Incident incident) {
    name_call(*rank.control, incident);
    const uint64_t index = ptx::fetch_add_sys(&rank.control->incident_count, 1);
    if (index < ControlBlock::kMaxIncidents) {
        for (ControlBlock* block : {rank.control, rank.report}) {
            block->incidents[index] = incident;
            ptx::store_release_sys(&block->complete[index], 1);
        }
    }
    if (incident.outcome != Outcome::Aborted) {
        const uint64_t word = ControlBlock::abort_word(incident.outcome, rank.rank);
        if (incident.outcome == Outcome::CutOff) {
            ptx::compare_and_swap_release_sys(&rank.control->abort, 0, word);
        } else {
            abort_all(rank, word);
        }
    }
    report_abort(rank);
}

// Whether an earlier launch failed, here or elsewhere, and left the rings unusable. Called by a
// warp before it takes part in anything.
EP_FN bool is_aborted(const DeviceRank& rank) {
    const bool aborted =
        __shfl_sync(0xffffffffu, ptx::load_acquire_sys(&rank.control->abort) != 0, 0);
    if (aborted && threadIdx.x % 32 == 0) report_abort(rank);
    return aborted;
}

#endif

}  // namespace ep
