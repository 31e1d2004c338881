#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/args.h"
#include "core/planned_layout.h"
#include "fabric/shared_memory.h"
#include "launch/virtual/phase.h"

namespace ep {

// What is simulated of the normal mode. Rows are those of one rank.
struct VirtualSettings : VirtualCase {
    int channels;
    int nvl_rows, rdma_rows;                          // of a ring, powers of two
    int nvl_batch, rdma_chunk;                        // see TransferArgs
    int slot_ratio = 1;                               // of a slot of combine, to one of dispatch
    double payload_bytes, scale_bytes;                // of a real row of dispatch
    double slot_bytes;                                // of it on the wire
    double combine_bytes, combine_slot_bytes;         // of combine, whose rows have no scales
    bool permutes_apart = false, sums_apart = false;  // dispatch's and combine's intra-rank pass
    int weight_bytes = kWeightBytes;                  // beside a row, of each k
};

// What a plan moves, see core/planned_layout.h.
struct VirtualPlan {
    const Move* moves;
    size_t count;
    const int32_t* tokens;  // of each rank
    int leaving;
    std::vector<bool> copies_apart;  // of each rank: launches of their own write the rows that stay
};

// The normal mode in virtual time: the roles of all ranks, as a GPU's launches distribute them over
// SMs. Calls follow each other as on GPUs: notify first, unless a plan says what it would, then any
// number of dispatches and combines.
class VirtualTransfers {
  public:
    // topk_idx: [T, K] of each simulated rank; they outlive this.
    VirtualTransfers(const Machine& machine, const VirtualSettings& settings,
                     std::vector<const int32_t*> topk_idx);
    // All ranks are simulated; num_tokens is not looked at.
    VirtualTransfers(const Machine& machine, const VirtualSettings& settings,
                     const VirtualPlan& plan);
    ~VirtualTransfers();

    VirtualPhase notify(const Look& look);
    VirtualPhase dispatch(const Look& look);
    VirtualPhase combine(const Look& look);

    int simulated_ranks() const;
    const ControlBlock& control(int rank) const;
    const Layout::Totals& totals(int rank) const;
    // Rows that cross the network between nodes in a dispatch, and those that arrive at other
    // ranks, of the simulated ranks.
    uint64_t rail_rows() const;
    uint64_t peer_rows() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace ep
