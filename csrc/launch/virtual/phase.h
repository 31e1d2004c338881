#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "exec/virtual/cluster.h"
#include "fabric/virtual/card.h"

namespace ep {

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

    // What each rank launches behind this, so many ns later.
    void append(const VirtualPhase& behind, double between);
};

// How much is done: copies and sums, of as many as there will be about in this phase.
using Look = std::function<void(uint64_t done, uint64_t all)>;

// Warps that begin together, and what came of them.
class VirtualLaunch {
  public:
    using Body = std::function<void(VirtualFiber&)>;

    // How ranks differ: one begins so many ns later, and one's warps have tracks. -1: none.
    struct Differences {
        int late_rank = -1;
        double late_by = 0;
        int traced_rank = -1;
    };

    // sms: of each rank, that its exchange runs on.
    VirtualLaunch(VirtualCluster& cluster, VirtualCards& cards, int sms,
                  const Differences& differences);

    // A warp on an SM of a rank.
    void add(int rank, int sm, Body body);
    // Until all have ended.
    VirtualPhase run(const Look& look = {}, uint64_t expected_rows = 0);

  private:
    VirtualPhase result() const;

    VirtualCluster& cluster_;
    VirtualCards& cards_;
    int sms_;
    Differences differences_;
    std::deque<VirtualFiber> fibers_;
    std::deque<std::vector<WaitSpan>> spans_;
};

}  // namespace ep
