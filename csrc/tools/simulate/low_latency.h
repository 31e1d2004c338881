#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/low_latency_args.h"
#include "tools/simulate/phase.h"

namespace ep {

// Settings of the low-latency mode. Numbers of rows are those of one rank.
struct VirtualLowLatencySettings : VirtualCase {
    int payload_bytes, scale_bytes;  // a row of dispatch
    int combine_bytes;               // a row of combine, which has no scales
    bool quantizes;                  // dispatch converts rows to fp8
    bool sums_at_expert;
};

// The low-latency mode in virtual time. One launch has both halves of a call, as on a GPU. The
// caller dispatches before it combines.
class VirtualLowLatency {
  public:
    // topk_idx: [T, K] for each simulated rank; must outlive this object.
    VirtualLowLatency(const Machine& machine, const VirtualLowLatencySettings& settings,
                      const std::vector<const int32_t*>& topk_idx);
    ~VirtualLowLatency();

    VirtualPhase dispatch(const OnProgress& on_progress);
    VirtualPhase combine(const OnProgress& on_progress);

    const ControlBlock& control(int rank) const;

    // Rows that the simulated ranks receive from other ranks, by way of transport.
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
