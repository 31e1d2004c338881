#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "core/incident.h"

namespace ep {

// What the roles of a rank need in order to wait, to give up and to report it.
struct RankState {
    int rank;
    ControlBlock* control;                  // in the rank's own heap
    std::vector<ControlBlock*> everyone;    // by rank, this one included
    std::chrono::duration<double> timeout;  // of each wait
    std::chrono::steady_clock::time_point deadline =
        std::chrono::steady_clock::time_point::max();  // of all waits of the current launch
    uint64_t call = 0;
    mutable uint64_t unfinished = 0;  // roles of the current launch that gave up
    mutable bool stalled = false;     // by a test's schedule: its roles neither go on nor begin
    uint64_t* waited = nullptr;       // [world], ns, see Heap; null: not measured

    // Whether a wait that began at `start`, of at most max_ns, is over.
    bool expired(std::chrono::steady_clock::time_point start, uint64_t max_ns) const {
        const auto now = std::chrono::steady_clock::now();
        const auto waited = now - start;
        return waited > timeout || now > deadline ||
               static_cast<uint64_t>(
                   std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count()) > max_ns;
    }

    bool aborted() const { return abort_word().load(std::memory_order_acquire) != 0; }

    std::atomic_ref<uint64_t> abort_word() const {
        return std::atomic_ref<uint64_t>(control->abort);
    }

    // Ends every wait of every rank, with CutOff those of this one alone. The first to give up is
    // remembered, and a rank that finds its word can read what it recorded before.
    void abort(Outcome outcome) const {
        for (ControlBlock* block : everyone) {
            if (outcome == Outcome::CutOff && block != control) continue;
            uint64_t nobody = 0;
            std::atomic_ref<uint64_t>(block->abort)
                .compare_exchange_strong(nobody, ControlBlock::abort_word(outcome, rank));
        }
    }

    void give_up() const { std::atomic_ref<uint64_t>(unfinished).fetch_add(1); }

    void record(const Incident& incident) const {
        const uint64_t index = std::atomic_ref<uint64_t>(control->incident_count).fetch_add(1);
        if (index >= ControlBlock::kMaxIncidents) return;
        control->incidents[index] = incident;
        std::atomic_ref<uint64_t>(control->complete[index]).store(1, std::memory_order_release);
    }

    void note_wait(int peer, uint64_t ns) const {
        if (waited && peer >= 0 && peer != rank)
            std::atomic_ref<uint64_t>(waited[peer]).fetch_add(ns, std::memory_order_relaxed);
    }

    // The buffer's number of the next call that a counter counts: see Calls.
    uint64_t next(uint64_t Calls::* count) const { return control->entered.*count + 1; }

    // Notes for others to read what the rank sends in the call that begins now.
    template <class Args>
    void note_sends(Sends::Mode mode, const Args& args) const {
        if (!stalled)
            note(control->sends_in(mode, call), Sends::word(args.kind(), call, args.format));
    }

    // Notes for others to read a call's number in `entered` or `finished`, after what was noted
    // before.
    static void note(uint64_t& count, uint64_t call) {
        std::atomic_ref<uint64_t>(count).store(call, std::memory_order_release);
    }
};

}  // namespace ep
