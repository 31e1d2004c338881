#include "bindings/incidents.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <string>

namespace py = pybind11;

namespace ep {

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

namespace {

const char* name(Wait wait) {
    switch (wait) {
        case Wait::None:
            return "nothing";
        case Wait::NotifyRail:
            return "counts from another node";
        case Wait::NotifyNode:
            return "counts from a rank of this node";
        case Wait::NvlCredit:
            return "room in a ring between ranks of this node";
        case Wait::NvlRow:
            return "a row in a ring between ranks of this node";
        case Wait::NvlDrain:
            return "a ring between ranks of this node to run empty";
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
        case Wait::ReceiverOrder:
            return "its turn among the receivers of a channel";
        case Wait::Release:
            return "a low-latency bank to be received";
        case Wait::Choices:
            return "the experts that a rank's tokens chose";
        case Wait::PutRows:
            return "rows that a warp puts through the network";
        case Wait::TaggedRow:
            return "a row in its slot";
        case Wait::Rows:
            return "all rows of a rank";
        case Wait::SendQueue:
            return "room in a send queue";
    }
    return "?";
}

const char* name(Sends::Kind kind) {
    switch (kind) {
        case Sends::Kind::Dispatch:
            return "dispatch";
        case Sends::Kind::Combine:
            return "combine";
        case Sends::Kind::WeightedCombine:
            return "combine with weights";
        case Sends::Kind::CombineAtExpert:
            return "combine with sum_at='expert'";
        case Sends::Kind::FlatDispatch:
            return "flat dispatch";
        case Sends::Kind::PlannedDispatch:
            return "dispatch by a plan";
        case Sends::Kind::PlannedCombine:
            return "combine by a plan";
    }
    return "?";
}

// Loads with acquire order, because kernels and other processes may be writing.
uint64_t load(const uint64_t& word) {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}

py::dict counts(const Calls& calls) {
    py::dict d;
    d["notify"] = load(calls.notify);
    d["transfer"] = load(calls.transfer);
    for (const int is_combine : {0, 1}) {
        const std::string kind = is_combine ? "combine" : "dispatch";
        d[py::str(kind + "_sent")] = load(calls.sent[is_combine]);
        for (const int bank : {0, 1}) {
            d[py::str(kind + "_received_" + std::to_string(bank))] =
                load(calls.received[is_combine][bank]);
        }
    }
    return d;
}

py::list sends_of(const ControlBlock& block) {
    static constexpr const char* kCounters[] = {"transfer", "dispatch_sent", "combine_sent"};
    py::list all;
    for (int mode = 0; mode < Sends::kModes; ++mode) {
        for (const uint64_t& kept : block.sends[mode]) {
            const uint64_t word = load(kept);
            if (!word) continue;
            const Sends sends = Sends::of(word);
            py::dict d;
            d["counter"] = kCounters[mode];
            d["call"] = sends.call;
            d["kind"] = name(sends.kind);
            d["payload_type"] = sends.payload_type;
            d["payload_bytes"] = sends.payload_bytes;
            d["topk"] = sends.topk;
            d["weight_bytes"] = sends.weight_bytes;
            d["scale_bytes"] = sends.scale_bytes;
            all.append(d);
        }
    }
    return all;
}

}  // namespace

const char* name_of_wait(uint64_t wait) { return name(static_cast<Wait>(wait)); }

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
        case Outcome::Masked:
            return "masked";
        case Outcome::CutOff:
            return "cut_off";
        case Outcome::Lost:
            return "lost";
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

Outcome outcome_of(bool interrupted, bool failed) {
    if (interrupted) return Outcome::Interrupted;
    return failed ? Outcome::Failed : Outcome::BadInput;
}

std::optional<std::pair<const char*, int>> first_reason(uint64_t abort_word) {
    if (!abort_word) return std::nullopt;
    return std::pair(name(ControlBlock::outcome_of(abort_word)), ControlBlock::rank_of(abort_word));
}

std::vector<py::dict> incidents_of(const ControlBlock& block) {
    std::vector<py::dict> all;
    for (int i = 0; i < ControlBlock::kMaxIncidents; ++i) {
        if (load(block.complete[i])) all.push_back(describe(block.incidents[i]));
    }
    return all;
}

py::dict rank_status_of(int rank, const ControlBlock& block) {
    const uint64_t bytes = std::min<uint64_t>(load(block.reason.bytes), Reason::kMaxBytes);
    py::dict d;
    d["rank"] = rank;
    d["entered"] = counts(block.entered);
    d["finished"] = counts(block.finished);
    d["incidents"] = incidents_of(block);
    d["sends"] = sends_of(block);
    d["reason"] = py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(block.reason.text, static_cast<Py_ssize_t>(bytes), "replace"));
    return d;
}

}  // namespace ep
