#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/args.h"
#include "core/planned_layout.h"
#include "fabric/shared_memory.h"
#include "tools/simulate/phase.h"

namespace ep {

// Settings of the normal mode. Numbers of rows are those of one rank.
struct VirtualSettings : VirtualCase {
    int channels;
    int nvl_rows, rdma_rows;                          // slots of a ring, powers of two
    int nvl_batch, rdma_chunk;                        // see TransferArgs
    int slot_ratio = 1;                               // combine's slot bytes / dispatch's
    double payload_bytes, scale_bytes;                // a real row of dispatch
    double slot_bytes;                                // that row on the wire
    double combine_bytes, combine_slot_bytes;         // a combine row has no scales
    bool permutes_apart = false, sums_apart = false;  // whether there is an intra-rank pass
    int weight_bytes = kWeightBytes;                  // for each expert of a row
};

// A plan's moves, see core/planned_layout.h.
struct VirtualPlan {
    const Move* moves;
    size_t count;
    const int32_t* tokens;  // [W], tokens of each rank
    int leaving;
    std::vector<bool> copies_apart;  // by rank: the intra-rank pass writes the rows that stay
};

// The normal mode in virtual time. Runs the roles of all simulated ranks, distributed over SMs as
// the GPU launches distribute them. Calls have the order that they have on GPUs: notify first,
// except with a plan, then any number of dispatches and combines.
class VirtualTransfers {
  public:
    // topk_idx: [T, K] for each simulated rank; must outlive this object.
    VirtualTransfers(const Machine& machine, const VirtualSettings& settings,
                     std::vector<const int32_t*> topk_idx);
    // Simulates all ranks. settings.num_tokens is not used: the plan has the numbers of tokens.
    VirtualTransfers(const Machine& machine, const VirtualSettings& settings,
                     const VirtualPlan& plan);
    ~VirtualTransfers();

    VirtualPhase notify(const OnProgress& on_progress);
    VirtualPhase dispatch(const OnProgress& on_progress);
    VirtualPhase combine(const OnProgress& on_progress);

    const ControlBlock& control(int rank) const;
    // Rows of one dispatch, summed over the simulated ranks: those that cross the network between
    // nodes, and those that arrive from another rank.
    uint64_t rail_rows() const;
    uint64_t peer_rows() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace ep
