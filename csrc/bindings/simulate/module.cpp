#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "bindings/incidents.h"
#include "bindings/launch_args.h"
#include "launch/virtual/transfers.h"

namespace py = pybind11;

namespace ep {
namespace {

constexpr std::pair<const char*, double Machine::*> kConstants[] = {
    {"step", &Machine::step},
    {"ballot", &Machine::ballot},
    {"poll", &Machine::poll},
    {"gather", &Machine::gather},
    {"flag_store", &Machine::flag_store},
    {"first_bytes", &Machine::first_bytes},
    {"warp_copy", &Machine::warp_copy},
    {"warp_sum", &Machine::warp_sum},
    {"sm_store", &Machine::sm_store},
    {"sm_read", &Machine::sm_read},
    {"sm_sum", &Machine::sm_sum},
    {"memory", &Machine::memory},
    {"own_write", &Machine::own_write},
    {"peer_write", &Machine::peer_write},
    {"own_flag", &Machine::own_flag},
    {"peer_flag", &Machine::peer_flag},
    {"link", &Machine::link},
    {"link_slack", &Machine::link_slack},
    {"launch", &Machine::launch},
    {"join", &Machine::join},
    {"card", &Machine::card},
    {"card_message", &Machine::card_message},
    {"card_post", &Machine::card_post},
    {"card_doorbell", &Machine::card_doorbell},
    {"card_way", &Machine::card_way},
    {"card_signal", &Machine::card_signal},
    {"card_turn", &Machine::card_turn},
};

Machine machine_of(int sms, const py::dict& constants) {
    Machine machine;
    machine.sms = sms;
    for (const auto& [name, member] : kConstants) {
        if (!constants.contains(name))
            throw py::value_error(std::string("a machine without ") + name);
        machine.*member = constants[name].cast<double>();
    }
    return machine;
}

py::dict waits(const std::array<double, kWaits>& waited) {
    py::dict d;
    for (int wait = 0; wait < kWaits; ++wait) {
        if (waited[wait] > 0) d[name_of_wait(wait)] = waited[wait];
    }
    return d;
}

py::dict describe(const VirtualPhase& phase) {
    py::dict d;
    d["ends"] = phase.ends;
    py::dict roles;
    for (int number = 0; number < kRoles; ++number) {
        const VirtualPhase::OfRole& of = phase.roles[number];
        if (!of.warps) continue;
        py::dict role;
        role["warps"] = of.warps;
        role["time"] = of.time;
        role["copied"] = of.copied;
        role["waited"] = waits(of.waited);
        roles[name(static_cast<Role>(number))] = role;
    }
    d["roles"] = roles;
    py::dict busy;
    busy["sm"] = phase.sm;
    busy["memory"] = phase.memory;
    busy["link_out"] = phase.link_out;
    busy["link_in"] = phase.link_in;
    busy["card"] = phase.card;
    d["busy"] = busy;
    d["bytes_sent"] = phase.bytes_sent;
    d["row_bytes"] = phase.row_bytes;
    d["messages"] = phase.messages;
    d["happened"] = phase.happened;
    d["switches"] = phase.switches;
    py::list tracks;
    for (const VirtualPhase::Track& track : phase.tracks) {
        py::list spans;
        for (const WaitSpan& span : track.waits)
            spans.append(py::make_tuple(name_of_wait(static_cast<uint64_t>(span.wait)), span.begin,
                                        span.end));
        py::dict t;
        t["role"] = name(track.role);
        t["channel"] = track.channel;
        t["sm"] = track.sm;
        t["begin"] = track.begin;
        t["end"] = track.end;
        t["waits"] = spans;
        tracks.append(t);
    }
    d["tracks"] = tracks;
    return d;
}

// Runs a phase without the GIL; Ctrl-C ends it.
template <class Run>
py::dict run(const Look& look, Run&& phase) {
    VirtualPhase done;
    {
        const py::gil_scoped_release release;
        done = phase([&](uint64_t rows, uint64_t all) {
            const py::gil_scoped_acquire acquire;
            if (PyErr_CheckSignals()) throw py::error_already_set();
            if (look) look(rows, all);
        });
    }
    return describe(done);
}

}  // namespace
}  // namespace ep

PYBIND11_MODULE(_simulate, m) {
    using namespace ep;
    m.doc() = "The protocol under a virtual clock. Times are in ns, rates in GB/s.";
    py::list names;
    for (const auto& [name, member] : kConstants) names.append(name);
    m.attr("CONSTANTS") = py::tuple(names);

    py::class_<Machine>(m, "Machine", "How long things take: see csrc/exec/virtual/machine.h.")
        .def(py::init(&machine_of), py::kw_only(), py::arg("sms"), py::arg("constants"));

    py::class_<VirtualTransfers>(m, "Transfers",
                                 "The normal mode in virtual time: see launch/virtual/transfers.h. "
                                 "topk_idx: addresses of int32 [T, K], of each simulated rank.")
        .def(py::init([](const Machine& machine, int nodes, int ranks_per_node, int simulated_nodes,
                         int num_experts, int topk, int num_tokens, int num_sms, int channels,
                         int nvl_rows, int rdma_rows, int nvl_batch, int rdma_chunk, int slot_ratio,
                         double payload_bytes, double scale_bytes, double slot_bytes,
                         double combine_bytes, double combine_slot_bytes, bool maps_rail,
                         bool permutes_apart, bool sums_apart, double timeout, int slow_rank,
                         double slow_speed, int lossy_rank, uint64_t lost_signal, int late_rank,
                         double late_by, uint64_t seed, int traced_rank,
                         const std::vector<Address>& topk_idx) {
                 VirtualSettings s;
                 s.topology = {nodes, ranks_per_node};
                 s.simulated_nodes = simulated_nodes;
                 s.num_experts = num_experts;
                 s.topk = topk;
                 s.num_tokens = num_tokens;
                 s.num_sms = num_sms;
                 s.channels = channels;
                 s.nvl_rows = nvl_rows;
                 s.rdma_rows = rdma_rows;
                 s.nvl_batch = nvl_batch;
                 s.rdma_chunk = rdma_chunk;
                 s.slot_ratio = slot_ratio;
                 s.payload_bytes = payload_bytes;
                 s.slot_bytes = slot_bytes;
                 s.combine_bytes = combine_bytes;
                 s.combine_slot_bytes = combine_slot_bytes;
                 s.scale_bytes = scale_bytes;
                 s.maps_rail = maps_rail;
                 s.permutes_apart = permutes_apart;
                 s.sums_apart = sums_apart;
                 s.timeout = timeout;
                 s.faults = {slow_rank, slow_speed, lossy_rank, lost_signal};
                 s.differences = {late_rank, late_by, traced_rank};
                 s.seed = seed;
                 std::vector<const int32_t*> ids;
                 for (const Address address : topk_idx) ids.push_back(at<int32_t>(address));
                 return std::make_unique<VirtualTransfers>(machine, s, ids);
             }),
             py::arg("machine"), py::kw_only(), py::arg("nodes"), py::arg("ranks_per_node"),
             py::arg("simulated_nodes"), py::arg("num_experts"), py::arg("topk"),
             py::arg("num_tokens"), py::arg("num_sms"), py::arg("channels"), py::arg("nvl_rows"),
             py::arg("rdma_rows"), py::arg("nvl_batch"), py::arg("rdma_chunk"),
             py::arg("slot_ratio"), py::arg("payload_bytes"), py::arg("scale_bytes"),
             py::arg("slot_bytes"), py::arg("combine_bytes"), py::arg("combine_slot_bytes"),
             py::arg("maps_rail"), py::arg("permutes_apart"), py::arg("sums_apart"),
             py::arg("timeout"), py::arg("slow_rank"), py::arg("slow_speed"), py::arg("lossy_rank"),
             py::arg("lost_signal"), py::arg("late_rank"), py::arg("late_by"), py::arg("seed"),
             py::arg("traced_rank"), py::arg("topk_idx"))
        .def(
            "notify",
            [](VirtualTransfers& t, const Look& look) {
                return run(look, [&](auto&& l) { return t.notify(l); });
            },
            py::arg("look") = py::none())
        .def(
            "dispatch",
            [](VirtualTransfers& t, const Look& look) {
                return run(look, [&](auto&& l) { return t.dispatch(l); });
            },
            py::arg("look") = py::none())
        .def(
            "combine",
            [](VirtualTransfers& t, const Look& look) {
                return run(look, [&](auto&& l) { return t.combine(l); });
            },
            py::arg("look") = py::none())
        .def(
            "first_reason",
            [](const VirtualTransfers& t) { return first_reason(t.control(0).abort); },
            "Who gave up first, and why; None: nobody did.")
        .def(
            "incidents",
            [](const VirtualTransfers& t, int rank) { return incidents_of(t.control(rank)); },
            py::arg("rank"))
        .def_property_readonly("rail_rows", &VirtualTransfers::rail_rows,
                               "Rows that cross the network in a dispatch of the simulated ranks.")
        .def_property_readonly("peer_rows", &VirtualTransfers::peer_rows,
                               "Rows that arrive at another rank than they come from.");
}
