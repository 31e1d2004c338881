// Incidents: why a call failed, and the control block by which ranks know of each other's failures.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/sends.h"

namespace ep {

// What a role was waiting for when its wait failed. bindings/incidents.cpp names them for
// users.
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
    LowLatencyCombineReceiver,
    OneHopSender,  // the same in calls of the normal API, see Config.max_tokens
    OneHopReceiver,
    OneHopCombineSender,
    OneHopCombineReceiver
};

constexpr Role kLastOfTransfers = Role::CombineReceiver;

// The role in one hop of a role of the low-latency mode.
constexpr Role in_one_hop(Role role) {
    constexpr int kApart =
        static_cast<int>(Role::OneHopSender) - static_cast<int>(Role::LowLatencySender);
    return static_cast<Role>(static_cast<int>(role) + kApart);
}

enum class Outcome : int {
    Ok,
    Timeout,      // this wait expired
    Aborted,      // another role or rank gave up first
    Interrupted,  // the user pressed Ctrl-C
    BadInput,     // a rank refused its arguments
    Failed,       // a rank failed for another reason, such as a lack of memory
    Mismatch,  // an unexpected row arrived: ranks issued different calls, or with different shapes
               // or types
    NoLayout,  // the handle's dispatch has failed
    Overflow,  // a table that the protocol needs is too small
    Masked,    // a backward pass meets a rank that was masked since its forward pass
    CutOff,    // another rank took this one for dead: it ends alone, the others go on
    Lost,      // the connection to this rank broke
};

// A wait is over once `observed` >= `required`. peer: the rank that must make progress; -1: none.
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

// Numbers of the last call of each kind, counted from 1 by the buffer: a heap of the low-latency
// mode numbers its calls for itself. Receiving halves may come in any order, and have the number
// with which their call was sent.
struct Calls {
    uint64_t notify;
    uint64_t transfer;  // dispatches and combines, also those in one hop
    uint64_t dispatch_sent, combine_sent, dispatch_received, combine_received;  // low-latency
};

// The reason that a rank's host gives when it ends the waits of all ranks.
struct Reason {
    static constexpr size_t kMaxBytes = 376;
    uint64_t bytes;  // length of the text; written after it
    char text[kMaxBytes];
};

// One per rank in its symmetric heap, for all ranks that map it to read: a rank that waits too long
// can then name the one that never came.
struct ControlBlock {
    static constexpr int kMaxIncidents = 32;
    // 0, or which rank gave up first and why (see first_reason). Every wait reads it.
    alignas(64) uint64_t abort;
    alignas(64) uint64_t incident_count;
    uint64_t complete[kMaxIncidents];  // 1 once the incident can be read
    Incident incidents[kMaxIncidents];
    Reason reason;
    alignas(64) Calls entered;  // this rank's calls, unless it found the abort word set
    Calls finished;             // and which of these it has finished
    uint64_t sends[Sends::kModes][Sends::kKept];  // of the last calls that it entered; 0: none
    // The last calls that it refused before it entered them: see megatron_ep/buffer/host.py.
    static constexpr int kRefusals = 4;
    uint64_t refused[kRefusals];

    // The word that describes what a call sends.
    EP_HD uint64_t& sends_in(Sends::Mode mode, uint64_t call) {
        return sends[static_cast<int>(mode)][call % Sends::kKept];
    }

    // A rank that gives up swaps this word for 0. The host of a GPU has no such atomic and stores
    // the upper half: a lower half beside it came first, as it could only replace a 0.
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
