#pragma once

#include <cstddef>
#include <cstdint>

#include "core/sends.h"

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
    ReceiverOrder,
    Release,
    Choices,
    PutRows,
    TaggedRow,
    Rows,
    SendQueue
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

constexpr Role kLastOfTransfers = Role::CombineReceiver;

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
    Masked,    // a backward pass meets a rank that was masked since its forward pass
    CutOff,    // another rank has taken this one for dead: it ends alone, the others go on
    Lost,      // the connection to this rank broke
};

// A wait is over once `observed` >= `required`; `peer` is the rank that has to make progress, -1:
// none.
struct WaitCondition {
    uint64_t observed;
    uint64_t required;
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

// The last call of each kind, by number, all kinds counted from 1. Of the low-latency mode a pair
// is a dispatch's and a combine's, and receiving halves, which may come in any order, have one a
// bank.
struct Calls {
    uint64_t notify;
    uint64_t transfer;  // dispatches and combines
    uint64_t sent[2];
    uint64_t received[2][2];
};

// What a rank's host gives as the reason when it ends the waits of all.
struct Reason {
    static constexpr size_t kMaxBytes = 376;
    uint64_t bytes;  // of the text; written after it
    char text[kMaxBytes];
};

// One per rank, in its symmetric heap, for all ranks in reach to read: a rank that waits too long
// can say which one never came.
struct ControlBlock {
    static constexpr int kMaxIncidents = 32;
    // 0, or tells who gave up first and why (see first_reason); every wait reads it.
    alignas(64) uint64_t abort;
    alignas(64) uint64_t incident_count;
    uint64_t complete[kMaxIncidents];  // 1 once the incident can be read
    Incident incidents[kMaxIncidents];
    Reason reason;
    alignas(64) Calls entered;                    // this rank's, unless it found the abort word set
    Calls finished;                               // and of these what it has done
    uint64_t sends[Sends::kModes][Sends::kKept];  // in the last calls that it entered, 0: none

    // Where what is sent in a call is noted.
    EP_HD uint64_t& sends_in(Sends::Mode mode, uint64_t call) {
        return sends[static_cast<int>(mode)][call % Sends::kKept];
    }

    // Who gives up swaps it for 0. The host of a GPU, which cannot, stores the upper half: a lower
    // one that stands beside it was there first, or it could not have been swapped for 0.
    static constexpr uint64_t abort_word(Outcome outcome, int rank) {
        return static_cast<uint64_t>(outcome) << kRankBits | static_cast<uint32_t>(rank);
    }
    static constexpr uint64_t first_reason(uint64_t word) {
        return word & 0xffffffff ? word & 0xffffffff : word >> 32;
    }
    static constexpr Outcome outcome_of(uint64_t word) {
        return static_cast<Outcome>(first_reason(word) >> kRankBits);
    }
    static constexpr int rank_of(uint64_t word) {
        return static_cast<int>(first_reason(word) & ((1 << kRankBits) - 1));
    }

  private:
    static constexpr int kRankBits = 24;
};

}  // namespace ep
