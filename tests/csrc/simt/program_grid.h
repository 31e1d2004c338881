#pragma once

#include "../program_ranks.h"
#include "exec/device/device_rank.h"
#include "ranks.h"
#include "simt.h"

namespace ep {

// The ranks of a program on GPUs. Between the ranks lies the p2p fabric, or with OVER_NCCL,
// OVER_NVSHMEM or OVER_QUEUE another.
class ProgramGrid {
  public:
    template <class AnyHeap>
    ProgramGrid(const ProgramRanks& ranks, const AnyHeap& heap, uint64_t seed, uint64_t timeout_ns)
        : ranks_(ranks),
          random_(seed),
          timeout_ns_(timeout_ns),
          fabric_(heap, ranks.heaps, seed),
          reports_(ranks.topology.world()) {
        for (const RankState& state : ranks.states) abort_words_.push_back(&state.control->abort);
    }

    int pick(int low, int high) { return low + static_cast<int>(random_() % (high - low + 1)); }
    ControlBlock& report(int rank) { return reports_[rank]; }
    const ControlBlock& report(int rank) const { return reports_[rank]; }
    void check_reports() const {
        for (const ControlBlock& report : reports_) {
            if (report.abort) simt::die("a wait ended badly");
        }
    }
    Ranks& fabric() { return fabric_; }
    void check_reset_signals() { fabric_.check_reset_signals(random_()); }

  protected:
    DeviceRank device_rank(int rank, uint64_t* waited) {
        return {rank,
                ranks_.topology.world(),
                timeout_ns_,
                ranks_.states[rank].control,
                &reports_[rank],
                abort_words_.data(),
                waited,
                Ranks::kOverHost};
    }
    uint64_t random() { return random_(); }

  private:
    const ProgramRanks& ranks_;
    std::mt19937_64 random_;
    uint64_t timeout_ns_;
    Ranks fabric_;
    std::vector<uint64_t*> abort_words_;
    std::vector<ControlBlock> reports_;
};

}  // namespace ep
