#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/incidents.h"
#include "bindings/members.h"
#include "tools/simulate/low_latency.h"
#include "tools/simulate/transfers.h"

namespace py = pybind11;

namespace ep {
namespace {

#define EP_CONSTANT(name) {#name, &Machine::name}
constexpr std::pair<const char*, double Machine::*> kConstants[] = {
    EP_CONSTANT(step),          EP_CONSTANT(ballot),       EP_CONSTANT(poll),
    EP_CONSTANT(gather),        EP_CONSTANT(flag_store),   EP_CONSTANT(first_bytes),
    EP_CONSTANT(warp_copy),     EP_CONSTANT(warp_sum),     EP_CONSTANT(warp_quantize),
    EP_CONSTANT(sm_store),      EP_CONSTANT(sm_read),      EP_CONSTANT(sm_sum),
    EP_CONSTANT(memory),        EP_CONSTANT(own_write),    EP_CONSTANT(peer_write),
    EP_CONSTANT(own_flag),      EP_CONSTANT(peer_flag),    EP_CONSTANT(link),
    EP_CONSTANT(link_slack),    EP_CONSTANT(launch),       EP_CONSTANT(join),
    EP_CONSTANT(card),          EP_CONSTANT(card_message), EP_CONSTANT(card_post),
    EP_CONSTANT(card_doorbell), EP_CONSTANT(card_way),     EP_CONSTANT(card_signal),
    EP_CONSTANT(card_turn)};

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

// Work without a role of the protocol is the local pass. Notify's warps wait for nothing but each
// other between steps, each of which begins when all warps of the rank have ended the previous one.
const char* label(Role role) { return role == Role::Launch ? "local pass" : name(role); }
const char* label(Wait wait) {
    return wait == Wait::None ? "the other warps of the rank"
                              : name_of_wait(static_cast<uint64_t>(wait));
}

// Returns the members of megatron_ep.tools.simulate.Phase, with times in us.
py::dict describe(const VirtualPhase& phase) {
    py::dict d;
    py::list ends;
    for (const double end : phase.ends) ends.append(end / 1e3);
    d["ends"] = ends;
    py::dict roles;
    for (int number = 0; number < kRoles; ++number) {
        const VirtualPhase::OfRole& of = phase.roles[number];
        if (!of.warps) continue;
        py::dict role, waited;
        for (int wait = 0; wait < kWaits; ++wait) {
            if (of.waited[wait] > 0) waited[label(static_cast<Wait>(wait))] = of.waited[wait] / 1e3;
        }
        role["warps"] = of.warps;
        role["time"] = of.time / 1e3;
        role["copied"] = of.copied / 1e3;
        role["waited"] = waited;
        roles[label(static_cast<Role>(number))] = role;
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
    return d;
}

// Runs a phase without the GIL, but calls on_progress with it. Ctrl-C ends the phase. Throws
// std::runtime_error if a wait expired.
template <class Mode>
py::dict run(Mode& mode, VirtualPhase (Mode::*phase)(const OnProgress&),
             const OnProgress& on_progress) {
    VirtualPhase done;
    {
        const py::gil_scoped_release release;
        done = (mode.*phase)([&](double part) {
            const py::gil_scoped_acquire acquire;
            if (PyErr_CheckSignals()) throw py::error_already_set();
            if (on_progress) on_progress(part);
        });
    }
    if (const auto first = first_reason(mode.control(0).abort))
        throw std::runtime_error("the simulation ended with " + std::string(first->first) +
                                 " of rank " + std::to_string(first->second));
    return describe(done);
}

template <class T>
void set(T& value, const py::dict& values, const char* name) {
    if (!values.contains(name)) throw py::value_error(std::string("settings without ") + name);
    value = values[name].cast<T>();
}

// Sets the settings that both modes share.
void set_case(VirtualCase& c, const py::dict& settings) {
    set(c.topology.nodes, settings, "nodes");
    set(c.topology.ranks_per_node, settings, "ranks_per_node");
    set(c.simulated_nodes, settings, "simulated_nodes");
    set(c.num_experts, settings, "num_experts");
    set(c.topk, settings, "topk");
    set(c.num_tokens, settings, "num_tokens");
    set(c.num_sms, settings, "num_sms");
    set(c.maps_rail, settings, "maps_rail");
    set(c.seed, settings, "seed");
}

VirtualSettings settings_of(const py::dict& settings) {
    VirtualSettings s;
    set_case(s, settings);
    set(s.channels, settings, "channels");
    set(s.nvl_rows, settings, "nvl_rows");
    set(s.rdma_rows, settings, "rdma_rows");
    set(s.nvl_batch, settings, "nvl_batch");
    set(s.rdma_chunk, settings, "rdma_chunk");
    set(s.slot_ratio, settings, "slot_ratio");
    set(s.payload_bytes, settings, "payload_bytes");
    set(s.scale_bytes, settings, "scale_bytes");
    set(s.slot_bytes, settings, "slot_bytes");
    set(s.combine_bytes, settings, "combine_bytes");
    set(s.combine_slot_bytes, settings, "combine_slot_bytes");
    set(s.permutes_apart, settings, "permutes_apart");
    set(s.sums_apart, settings, "sums_apart");
    set(s.weight_bytes, settings, "weight_bytes");
    return s;
}

VirtualLowLatencySettings low_latency_settings_of(const py::dict& settings) {
    VirtualLowLatencySettings s;
    set_case(s, settings);
    set(s.payload_bytes, settings, "payload_bytes");
    set(s.scale_bytes, settings, "scale_bytes");
    set(s.combine_bytes, settings, "combine_bytes");
    set(s.quantizes, settings, "quantizes");
    set(s.sums_at_expert, settings, "sums_at_expert");
    return s;
}

std::vector<const int32_t*> ids_of(const std::vector<uintptr_t>& topk_idx) {
    std::vector<const int32_t*> ids;
    for (const uintptr_t address : topk_idx) ids.push_back(as<int32_t*>(address));
    return ids;
}

// Binds a phase of either mode.
template <class Mode>
void add_phase(py::class_<Mode>& mode, const char* name,
               VirtualPhase (Mode::*phase)(const OnProgress&)) {
    mode.def(
        name,
        [phase](Mode& m, const OnProgress& on_progress) { return run(m, phase, on_progress); },
        py::arg("on_progress") = py::none(), "Raises RuntimeError if a wait expires.");
}

void bind_transfers(py::module_& m) {
    py::class_<VirtualTransfers> transfers(
        m, "Transfers",
        "The normal mode in virtual time, whose settings tools/simulate/transfers.h names. "
        "topk_idx: addresses of int32 [T, K], of each simulated rank.");
    transfers
        .def(py::init([](const Machine& machine, const std::vector<uintptr_t>& topk_idx,
                         const py::dict& settings) {
                 return std::make_unique<VirtualTransfers>(machine, settings_of(settings),
                                                           ids_of(topk_idx));
             }),
             py::arg("machine"), py::kw_only(), py::arg("topk_idx"), py::arg("settings"))
        .def_static(
            "planned",
            [](const Machine& machine, uintptr_t moves, size_t count, uintptr_t tokens, int leaving,
               const std::vector<bool>& copies_apart, const py::dict& settings) {
                const VirtualPlan plan{as<Move*>(moves), count, as<int32_t*>(tokens), leaving,
                                       copies_apart};
                return std::make_unique<VirtualTransfers>(machine, settings_of(settings), plan);
            },
            py::arg("machine"), py::kw_only(), py::arg("moves"), py::arg("count"),
            py::arg("tokens"), py::arg("leaving"), py::arg("copies_apart"), py::arg("settings"),
            "Of a plan, whose tables are as Heap.lay_out takes them.")
        .def_property_readonly("rail_rows", &VirtualTransfers::rail_rows,
                               "Rows that cross the network in a dispatch of the simulated ranks.")
        .def_property_readonly("peer_rows", &VirtualTransfers::peer_rows,
                               "Rows that arrive at another rank than they come from.");
    add_phase(transfers, "notify", &VirtualTransfers::notify);
    add_phase(transfers, "dispatch", &VirtualTransfers::dispatch);
    add_phase(transfers, "combine", &VirtualTransfers::combine);
}

void bind_low_latency(py::module_& m) {
    py::class_<VirtualLowLatency> low_latency(
        m, "LowLatency",
        "The low-latency mode in virtual time, whose settings tools/simulate/low_latency.h names; "
        "the rest as of Transfers.");
    low_latency
        .def(py::init([](const Machine& machine, const std::vector<uintptr_t>& topk_idx,
                         const py::dict& settings) {
                 return std::make_unique<VirtualLowLatency>(
                     machine, low_latency_settings_of(settings), ids_of(topk_idx));
             }),
             py::arg("machine"), py::kw_only(), py::arg("topk_idx"), py::arg("settings"))
        .def(
            "arrivals",
            [](const VirtualLowLatency& l, bool combine) {
                const VirtualLowLatency::Arrivals all = combine ? l.of_combine() : l.of_dispatch();
                return py::make_tuple(all.over_network, all.over_links);
            },
            py::arg("combine"),
            "Rows that come to the simulated ranks over the network, and over NVLink.");
    add_phase(low_latency, "dispatch", &VirtualLowLatency::dispatch);
    add_phase(low_latency, "combine", &VirtualLowLatency::combine);
}

}  // namespace
}  // namespace ep

PYBIND11_MODULE(_simulate, m) {
    using namespace ep;
    m.doc() = "The protocol under a virtual clock. Times are in ns, rates in GB/s.";
    py::list names;
    for (const auto& [name, member] : kConstants) names.append(name);
    m.attr("CONSTANTS") = py::tuple(names);

    py::class_<Machine>(m, "Machine", "How long things take: see csrc/tools/simulate/cluster.h.")
        .def(py::init(&machine_of), py::kw_only(), py::arg("sms"), py::arg("constants"));
    bind_transfers(m);
    bind_low_latency(m);
}
