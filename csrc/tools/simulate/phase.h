#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "core/topology.h"
#include "launch/channel_roles.h"
#include "tools/simulate/card.h"
#include "tools/simulate/cluster.h"

namespace ep {

constexpr int kRoles = static_cast<int>(Role::LowLatencyCombineReceiver) + 1;
constexpr int kWeightBytes = 4;  // bytes of one weight

// Measurements of a phase in virtual time: one launch, or several in sequence. Times are in ns.
struct VirtualPhase {
    struct OfRole {
        int warps = 0;
        double time = 0;    // from begin to end, summed over the warps
        double copied = 0;  // the part of `time` spent in copies and sums
        std::array<double, kWaits> waited{};
    };
    std::vector<double> ends;  // by rank: when its last warp ended
    std::array<OfRole, kRoles> roles;
    double sm = 0, memory = 0, link_out = 0, link_in = 0, card = 0;  // busy share, rank maximum
    double bytes_sent = 0, row_bytes = 0;                            // all cards; rows: no flags
    uint64_t messages = 0;

    // Adds a phase that each rank launches `between` ns after the end of this one.
    void append(const VirtualPhase& behind, double between);
};

// Is called with the progress of a phase, 0 to 1.
using OnProgress = std::function<void(double)>;

// Settings that both modes share. Tokens and SMs are those of one rank.
struct VirtualCase {
    Topology topology;
    int simulated_nodes;  // the others are images of these, see tools/simulate/heaps.h
    int num_experts, topk, num_tokens;
    int num_sms;
    bool maps_rail = false;  // nodes reach each other's memory
    uint64_t seed = 0;  // puts simultaneous events in a random order; 0: in the order of requests

    int ranks() const { return simulated_nodes * topology.ranks_per_node; }
};

// Returns the addresses of `ranks` consecutive heaps of `bytes` bytes each.
std::vector<char*> heaps_in(char* memory, size_t bytes, int ranks);

inline int warps_of_blocks(int blocks) { return blocks * kBlockWarps; }

// Calls f(block, warp) for each warp of a launch.
template <class F>
void for_warps(int blocks, F&& f) {
    for (int block = 0; block < blocks; ++block) {
        for (int warp = 0; warp < kBlockWarps; ++warp) f(block, warp);
    }
}

// A launch in virtual time: its warps begin together.
class VirtualLaunch {
  public:
    using Body = std::function<void(VirtualFiber&)>;

    // sms: SMs of each rank on which the exchange runs, the base of the share `sm`.
    VirtualLaunch(VirtualCluster& cluster, VirtualCards& cards, int sms);

    // Adds a warp that runs `body` on an SM of a rank.
    void add(int rank, int sm, Body body);
    // Runs all warps to their ends. expected_rows: about how many it copies and sums.
    VirtualPhase run(const OnProgress& on_progress = {}, uint64_t expected_rows = 0);

  private:
    VirtualPhase result();

    VirtualCluster& cluster_;
    VirtualCards& cards_;
    int sms_;
    std::deque<VirtualFiber> fibers_;
};

}  // namespace ep
