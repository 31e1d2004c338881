#include "bindings/incidents.h"

namespace py = pybind11;

namespace ep {
namespace {

const char* name(Role role) {
    switch (role) {
        case Role::Launch:
            return "launch";
        case Role::Notify:
            return "notify";
        case Role::NvlSender:
            return "nvl_sender";
        case Role::RdmaSender:
            return "rdma_sender";
        case Role::SenderCoordinator:
            return "sender_coordinator";
        case Role::Forwarder:
            return "forwarder";
        case Role::ForwarderCoordinator:
            return "forwarder_coordinator";
        case Role::Receiver:
            return "receiver";
        case Role::CombineNvlSender:
            return "combine_nvl_sender";
        case Role::CombineForwarder:
            return "combine_forwarder";
        case Role::CombineReceiver:
            return "combine_receiver";
        case Role::LowLatencySender:
            return "low_latency_sender";
        case Role::LowLatencyReceiver:
            return "low_latency_receiver";
        case Role::LowLatencyCombineSender:
            return "low_latency_combine_sender";
        case Role::LowLatencyCombineReceiver:
            return "low_latency_combine_receiver";
    }
    return "?";
}

const char* name(Wait wait) {
    switch (wait) {
        case Wait::None:
            return "nothing";
        case Wait::NotifyRail:
            return "counts from another node";
        case Wait::NotifyNode:
            return "counts from a rank of this node";
        case Wait::NvlCredit:
            return "room in an NVLink ring";
        case Wait::NvlRow:
            return "a row in an NVLink ring";
        case Wait::NvlDrain:
            return "an NVLink ring to run empty";
        case Wait::RdmaCredit:
            return "room in a network ring";
        case Wait::RdmaRow:
            return "a row in a network ring";
        case Wait::RdmaDrain:
            return "a network ring to run empty";
        case Wait::PackedRow:
            return "rows for another node";
        case Wait::FreedRow:
            return "rows to be taken from a network ring";
        case Wait::PartialRow:
            return "a token's partial sums";
        case Wait::Release:
            return "a low-latency bank to be received";
        case Wait::Choices:
            return "the experts that a rank's tokens chose";
        case Wait::PutRows:
            return "rows that a warp puts through the network";
        case Wait::TaggedRow:
            return "a row in its slot";
    }
    return "?";
}

}  // namespace

const char* name(Outcome outcome) {
    switch (outcome) {
        case Outcome::Ok:
            return "ok";
        case Outcome::Timeout:
            return "timeout";
        case Outcome::Aborted:
            return "aborted";
        case Outcome::Interrupted:
            return "interrupted";
        case Outcome::BadInput:
            return "bad_input";
        case Outcome::Failed:
            return "failed";
        case Outcome::Mismatch:
            return "mismatch";
        case Outcome::NoLayout:
            return "no_layout";
        case Outcome::Overflow:
            return "overflow";
    }
    return "?";
}

py::dict describe(const Incident& incident) {
    py::dict d;
    d["outcome"] = name(incident.outcome);
    d["role"] = name(incident.role);
    d["waiting_for"] = name(incident.wait);
    d["rank"] = incident.rank;
    d["channel"] = incident.channel;
    d["peer"] = incident.peer;
    d["seen"] = incident.seen;
    d["expected"] = incident.expected;
    d["call"] = incident.call;
    return d;
}

}  // namespace ep
