#pragma once

#include <cstdint>

#include "core/incident.h"
#if defined(__CUDACC__)
#include "exec/device/ptx.h"
#endif

namespace ep {

// What the warps of a rank need to know to wait, to give up and to say so.
struct DeviceRank {
    int rank;
    int num_reachable;
    uint64_t timeout_ns;  // of every single wait
    // In the rank's own heap: `abort` is what waits poll, the count gives incidents their place.
    ControlBlock* control;
    // In memory of the host: what it sees of them, while a kernel runs and after.
    ControlBlock* report;
    uint64_t** abort_words;  // of the ranks whose memory this one can write, its own among them
    uint64_t* waited;        // [world], ns, see Heap
    // Whether the abort word of the report ends waits, too: for a host that hears of ranks on other
    // machines.
    bool hears_report;
};

#if defined(__CUDACC__)

// Memory of the host sees no atomics, which not every bus has: all who write this word tell the
// same reason.
__device__ __forceinline__ void report_abort(const DeviceRank& rank) {
    ptx::store_release_sys(&rank.report->abort, ptx::load_acquire_sys(&rank.control->abort));
}

// By one thread: makes all waits of all ranks in reach end as the word says.
__device__ __forceinline__ void abort_all(const DeviceRank& rank, uint64_t word) {
    for (int i = 0; i < rank.num_reachable; ++i)
        ptx::compare_and_swap_release_sys(rank.abort_words[i], 0, word);
}

// Whether the host has heard that somebody gave up, which is passed on. Not inlined: every wait
// would pay for it with registers.
__device__ __noinline__ inline bool has_heard(const DeviceRank& rank) {
    const uint64_t word = ptx::load_acquire_sys(&rank.report->abort);
    if (word) abort_all(rank, word);
    return word != 0;
}

// By a lane that waits, now and then: whether somebody gave up.
__device__ __forceinline__ bool has_ended(const DeviceRank& rank) {
    return ptx::load_acquire_sys(&rank.control->abort) || (rank.hears_report && has_heard(rank));
}

// By one thread: makes all waits of all ranks in reach end, or of this one if only it is concerned,
// and tells the host. A rank that finds the abort word can read the incident.
__device__ __noinline__ inline void give_up(const DeviceRank& rank, Incident incident) {
    // Counted on the GPU: a captured launch brings the same number each time.
    const bool is_transfer = incident.role >= Role::NvlSender && incident.role <= kLastOfTransfers;
    const bool has_waited =
        incident.outcome == Outcome::Timeout || incident.outcome == Outcome::Aborted;
    if (is_transfer && has_waited)
        incident.call = ptx::load_acquire_sys(&rank.control->entered.transfer);
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

// By a warp, before it takes part in anything: whether an earlier launch failed, here or elsewhere,
// and left the rings unusable.
__device__ __forceinline__ bool is_aborted(const DeviceRank& rank) {
    const bool aborted =
        __shfl_sync(0xffffffffu, ptx::load_acquire_sys(&rank.control->abort) != 0, 0);
    if (aborted && threadIdx.x % 32 == 0) report_abort(rank);
    return aborted;
}

#endif

}  // namespace ep
