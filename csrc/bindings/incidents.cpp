#include "bindings/incidents.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <string>

namespace py = pybind11;
using namespace py::literals;

namespace ep {
namespace {

// The names of enumerators, in their order.
constexpr const char* kRoleNames[] = {"launch",
                                      "notify",
                                      "nvl_sender",
                                      "rdma_sender",
                                      "sender_coordinator",
                                      "forwarder",
                                      "forwarder_coordinator",
                                      "receiver",
                                      "combine_nvl_sender",
                                      "combine_forwarder",
                                      "combine_receiver",
                                      "low_latency_sender",
                                      "low_latency_receiver",
                                      "low_latency_combine_sender",
                                      "low_latency_combine_receiver",
                                      "one_hop_sender",
                                      "one_hop_receiver",
                                      "one_hop_combine_sender",
                                      "one_hop_combine_receiver"};
static_assert(std::size(kRoleNames) == static_cast<size_t>(Role::OneHopCombineReceiver) + 1);
constexpr const char* kWaitNames[] = {"nothing",
                                      "counts from another node",
                                      "counts from a rank of this node",
                                      "room in a ring between ranks of this node",
                                      "a row in a ring between ranks of this node",
                                      "a ring between ranks of this node to run empty",
                                      "room in a network ring",
                                      "a row in a network ring",
                                      "a network ring to run empty",
                                      "rows for another node",
                                      "rows to be taken from a network ring",
                                      "a token's partial sums",
                                      "its turn among the receivers of a channel",
                                      "a low-latency bank to be received",
                                      "the experts that a rank's tokens chose",
                                      "rows that a warp puts through the network",
                                      "a row in its slot",
                                      "all rows of a rank",
                                      "room in a send queue"};
static_assert(std::size(kWaitNames) == static_cast<size_t>(Wait::SendQueue) + 1);
constexpr const char* kKindNames[] = {"dispatch",
                                      "combine",
                                      "combine with weights",
                                      "combine with sum_at='expert'",
                                      "flat dispatch",
                                      "dispatch by a plan",
                                      "combine by a plan"};
static_assert(std::size(kKindNames) == static_cast<size_t>(Sends::Kind::PlannedCombine) + 1);
constexpr const char* kOutcomeNames[] = {"ok",        "timeout", "aborted",  "interrupted",
                                         "bad_input", "failed",  "mismatch", "no_layout",
                                         "overflow",  "masked",  "cut_off",  "lost"};
static_assert(std::size(kOutcomeNames) == static_cast<size_t>(Outcome::Lost) + 1);

template <size_t kNames, class Enum>
const char* name_in(const char* const (&names)[kNames], Enum value) {
    const auto number = static_cast<size_t>(value);
    return number < kNames ? names[number] : "?";
}

const char* name(Wait wait) { return name_in(kWaitNames, wait); }
const char* name(Sends::Kind kind) { return name_in(kKindNames, kind); }

// Loads with acquire order, because kernels and other processes may be writing.
uint64_t load(const uint64_t& word) {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}

py::dict counts(const Calls& calls) {
    py::dict d;
    d["notify"] = load(calls.notify);
    d["transfer"] = load(calls.transfer);
    d["dispatch_sent"] = load(calls.dispatch_sent);
    d["combine_sent"] = load(calls.combine_sent);
    d["dispatch_received"] = load(calls.dispatch_received);
    d["combine_received"] = load(calls.combine_received);
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
            all.append(py::dict("counter"_a = kCounters[mode], "call"_a = sends.call,
                                "kind"_a = name(sends.kind), "payload_type"_a = sends.payload_type,
                                "payload_bytes"_a = sends.payload_bytes, "topk"_a = sends.topk,
                                "weight_bytes"_a = sends.weight_bytes,
                                "scale_bytes"_a = sends.scale_bytes));
        }
    }
    return all;
}

}  // namespace

const char* name_of_wait(uint64_t wait) { return name(static_cast<Wait>(wait)); }

const char* name(Role role) { return name_in(kRoleNames, role); }
const char* name(Outcome outcome) { return name_in(kOutcomeNames, outcome); }

py::dict describe(const Incident& incident) {
    return py::dict("outcome"_a = name(incident.outcome), "role"_a = name(incident.role),
                    "waiting_for"_a = name(incident.wait), "rank"_a = incident.rank,
                    "channel"_a = incident.channel, "peer"_a = incident.peer,
                    "seen"_a = incident.seen, "expected"_a = incident.expected,
                    "call"_a = incident.call);
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
    py::list refused;  // read after `entered`, because a rank writes it before
    for (const uint64_t& word : block.refused) refused.append(load(word));
    d["refused"] = refused;
    d["reason"] = py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(block.reason.text, static_cast<Py_ssize_t>(bytes), "replace"));
    return d;
}

}  // namespace ep
