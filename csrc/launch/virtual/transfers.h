#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/args.h"
#include "exec/virtual/cluster.h"
#include "fabric/shared_memory.h"
#include "fabric/virtual/card.h"

namespace ep {

// What is simulated. Rows and SMs are those of one rank.
struct VirtualSettings {
    Topology topology;
    int simulated_nodes;  // the others are images of these, see VirtualFabric
    int num_experts, topk, num_tokens;
    int num_sms, channels;
    int nvl_rows, rdma_rows;                          // of a ring, powers of two
    int nvl_batch, rdma_chunk;                        // see TransferArgs
    int slot_ratio = 1;                               // of a slot of combine, to one of dispatch
    double payload_bytes, scale_bytes;                // of a real row of dispatch
    double slot_bytes;                                // of it on the wire
    double combine_bytes, combine_slot_bytes;         // of combine, whose rows have no scales
    bool maps_rail = false;                           // nodes reach each other's memory
    bool permutes_apart = false, sums_apart = false;  // dispatch's and combine's local pass
    double timeout = 10e9;                            // ns
    VirtualCards::Faults faults;
    int late_rank = -1;
    double late_by = 0;  // ns
    uint64_t seed = 0;   // of the order of what happens at the same time; 0: as announced
    int traced_rank = -1;
};

constexpr int kRoles = static_cast<int>(Role::LowLatencyCombineReceiver) + 1;

// A launch, or several that belong together. Times are in ns.
struct VirtualPhase {
    struct OfRole {
        int warps = 0;
        double time = 0;    // of all warps, from the launch to their ends
        double copied = 0;  // of it in copies and sums
        std::array<double, kWaits> waited{};
    };
    struct Track {
        Role role;
        int channel, sm;
        double begin, end;
        std::vector<WaitSpan> waits;
    };
    std::vector<double> ends;  // of each rank
    std::array<OfRole, kRoles> roles;
    double sm = 0, memory = 0, link_out = 0, link_in = 0, card = 0;  // busy, of the time; busiest
    double bytes_sent = 0, row_bytes = 0;                            // by all cards, and of rows
    uint64_t messages = 0, happened = 0, switches = 0;
    std::vector<Track> tracks;  // of the traced rank
};

// The normal mode in virtual time: the roles of all ranks, as a GPU's launches distribute them over
// SMs. Calls follow each other as on GPUs: notify first, then any number of dispatches and
// combines.
class VirtualTransfers {
  public:
    // topk_idx: [T, K] of each simulated rank; they outlive this.
    VirtualTransfers(const Machine& machine, const VirtualSettings& settings,
                     std::vector<const int32_t*> topk_idx);
    ~VirtualTransfers();

    // How much is done: copies and sums, of as many as there will be about in this phase.
    using Look = std::function<void(uint64_t done, uint64_t all)>;

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
