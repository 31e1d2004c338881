#pragma once

#include <cstdint>

namespace ep {

// What a role was waiting for when its wait ended badly. Names are shown to users: see
// bindings/incidents.cpp.
enum class Wait : int {
    None,
    NotifyRail,
    NotifyNode,
    NvlCredit,
    NvlRow,
    NvlDrain,
    RdmaCredit,
    RdmaRow,
    RdmaDrain,
    PackedRow,
    FreedRow,
    PartialRow,
    Release,
    Choices,
    PutRows,
    TaggedRow
};

enum class Role : int {
    Launch,
    Notify,
    NvlSender,
    RdmaSender,
    SenderCoordinator,
    Forwarder,
    ForwarderCoordinator,
    Receiver,
    CombineNvlSender,
    CombineForwarder,
    CombineReceiver,
    LowLatencySender,
    LowLatencyReceiver,
    LowLatencyCombineSender,
    LowLatencyCombineReceiver
};

enum class Outcome : int {
    Ok,
    Timeout,      // this wait expired
    Aborted,      // another role or rank gave up first
    Interrupted,  // the user pressed Ctrl-C
    BadInput,     // a rank refused its arguments
    Failed,       // a rank failed for a reason of its own, such as a lack of memory
    Mismatch,  // a row arrived that was not meant: ranks issued different calls, or with different
               // shapes or types
    NoLayout,  // the handle is that of a dispatch that failed
    Overflow,  // a table that the protocol cannot do without is too small
};

// A wait is over when `seen` has reached `expected`; `peer` is the rank whose progress would do it.
struct Need {
    uint64_t seen;
    uint64_t expected;
    int peer;
};

struct Incident {
    Outcome outcome;
    Role role;
    Wait wait;
    int rank;
    int channel;
    int peer;
    uint64_t seen;
    uint64_t expected;
    uint64_t call;
};

// One per rank, in its symmetric heap. `abort` is 0, or tells who gave up first and why; every wait
// reads it.
struct ControlBlock {
    static constexpr int kMaxIncidents = 32;
    alignas(64) uint64_t abort;
    alignas(64) uint64_t incident_count;
    Incident incidents[kMaxIncidents];

    static constexpr uint64_t abort_word(Outcome outcome, int rank) {
        return (static_cast<uint64_t>(outcome) << 32) | static_cast<uint32_t>(rank);
    }
};

}  // namespace ep
