#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "core/topology.h"
#include "exec/virtual/cluster.h"
#include "fabric/virtual/card.h"
#include "launch/cuda/roles.h"

namespace ep {

constexpr int kRoles = static_cast<int>(Role::LowLatencyCombineReceiver) + 1;
constexpr int kWeightBytes = 4;  // of a row's weight

// A launch, or several that belong together. Times are in ns.
struct VirtualPhase {
    struct OfRole {
        int warps = 0;
        double time = 0;    // of all warps, from the launch to their ends
        double copied = 0;  // of it in copies and sums
        std::array<double, kWaits> waited{};
    };
    struct Track {
        int channel, sm;
        VirtualTask task;
    };
    std::vector<double> ends;  // of each rank
    std::array<OfRole, kRoles> roles;
    double sm = 0, memory = 0, link_out = 0, link_in = 0, card = 0;  // busy, of the time; busiest
    double bytes_sent = 0, row_bytes = 0;                            // by all cards, and of rows
    uint64_t messages = 0, happened = 0, switches = 0;
    std::vector<Track> tracks;  // of the traced rank

    // What each rank launches behind this, so many ns later.
    void append(const VirtualPhase& behind, double between);
};

// How much is done: copies and sums, of as many as there will be about in this phase.
using Look = std::function<void(uint64_t done, uint64_t all)>;

// How ranks differ: one begins so many ns later, and one's warps have tracks. -1: none.
struct VirtualDifferences {
    int late_rank = -1;
    double late_by = 0;
    int traced_rank = -1;
};

// What is simulated, of any mode. Tokens and SMs are those of one rank.
struct VirtualCase {
    Topology topology;
    int simulated_nodes;  // the others are images of these, see fabric/virtual/images.h
    int num_experts, topk, num_tokens;
    int num_sms;
    bool maps_rail = false;  // nodes reach each other's memory
    double timeout = 10e9;   // ns
    VirtualCards::Faults faults;
    VirtualDifferences differences;
    uint64_t seed = 0;  // of the order of what happens at the same time; 0: as announced

    int ranks() const { return simulated_nodes * topology.ranks_per_node; }
};

// Heaps of so many bytes that follow each other.
std::vector<char*> heaps_in(char* memory, size_t bytes, int ranks);

inline int warps_of_blocks(int blocks) { return blocks * kBlockWarps; }

// f(block, warp) for each warp of the blocks of a launch.
template <class F>
void for_warps(int blocks, F&& f) {
    for (int block = 0; block < blocks; ++block) {
        for (int warp = 0; warp < kBlockWarps; ++warp) f(block, warp);
    }
}

// Warps that begin together, and what came of them.
class VirtualLaunch {
  public:
    using Body = std::function<void(VirtualFiber&)>;

    // sms: of each rank, that its exchange runs on.
    VirtualLaunch(VirtualCluster& cluster, VirtualCards& cards, int sms,
                  const VirtualDifferences& differences);

    // A warp on an SM of a rank.
    void add(int rank, int sm, Body body);
    // Until all have ended.
    VirtualPhase run(const Look& look = {}, uint64_t expected_rows = 0);

  private:
    VirtualPhase result();

    VirtualCluster& cluster_;
    VirtualCards& cards_;
    int sms_;
    VirtualDifferences differences_;
    std::deque<VirtualFiber> fibers_;
};

}  // namespace ep
