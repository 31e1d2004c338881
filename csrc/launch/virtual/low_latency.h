#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/low_latency_args.h"
#include "launch/virtual/phase.h"

namespace ep {

// What is simulated of the low-latency mode. Rows are those of one rank.
struct VirtualLowLatencySettings : VirtualCase {
    int payload_bytes, scale_bytes;  // of a row of dispatch
    int combine_bytes;               // of combine, whose rows have no scales
    bool quantizes;                  // dispatch's rows become fp8 on the way
    bool sums_at_expert;
};

// The low-latency mode in virtual time: both halves of a call in one launch, as on a GPU. A
// dispatch, then any number of combines.
class VirtualLowLatency {
  public:
    // topk_idx: [T, K] of each simulated rank; they outlive this.
    VirtualLowLatency(const Machine& machine, const VirtualLowLatencySettings& settings,
                      const std::vector<const int32_t*>& topk_idx);
    ~VirtualLowLatency();

    VirtualPhase dispatch(const Look& look);
    VirtualPhase combine(const Look& look);

    const ControlBlock& control(int rank) const;

    // Rows that come to the simulated ranks from other ranks over the network, and over NVLink.
    struct Arrivals {
        uint64_t over_network = 0, over_links = 0;
    };
    Arrivals of_dispatch() const;
    Arrivals of_combine() const;

  private:
    template <class Rows>
    Arrivals count(Rows&& rows) const;

    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace ep
