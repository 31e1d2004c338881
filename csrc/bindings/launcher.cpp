#include "bindings/launcher.h"

#include <pybind11/stl.h>

#include <new>
#include <string>

#include "bindings/incidents.h"
#include "bindings/members.h"
#include "bindings/module.h"

namespace py = pybind11;

namespace ep {
namespace {

// Makes a new layout, because the offsets of its parts depend on the number of tokens.
template <class Args>
void set_tokens(Args& a, uint64_t tokens) {
    const Layout before = a.layout;
    a.layout = {a.heap.topology,    static_cast<int>(tokens), a.format.topk,
                a.heap.num_experts, a.heap.channels,          before.data};
    a.layout.is_planned = before.is_planned;
}

template <int kIndex>
void set_bias(CombineArgs& args, uint64_t address) {
    args.bias[kIndex] = reinterpret_cast<const char*>(address);
}

// Members of both directions, in core/args.h and core/low_latency_args.h.
template <class A>
Setters<A> with_transfer(Setters<A> setters) {
    setters.merge(Setters<A>{EP_SETTER("num_tokens", set_tokens<A>),
                             EP_SETTER("layout", set<A, &A::layout, &Layout::data>),
                             EP_SETTER("is_planned", set<A, &A::layout, &Layout::is_planned>),
                             EP_MEMBER(nvl_batch), EP_MEMBER(rdma_chunk), EP_MEMBER(dst_rows),
                             EP_MEMBER(rail_experts), EP_MEMBER(max_received), EP_MEMBER(max_rail),
                             EP_MEMBER(max_rows), EP_MEMBER(is_flat),
                             EP_MEMBER(resets_since_made)});
    return setters;
}
#define EP_MASK(name) EP_SETTER(#name, set<A, &A::mask, &LowLatencyMask::name>)
template <class A>
Setters<A> with_low_latency(Setters<A> setters) {
    setters.merge(Setters<A>{EP_SETTER("layout", set<A, &A::layout, &LowLatencyLayout::data>),
                             EP_MEMBER(num_tokens), EP_MEMBER(call), EP_MEMBER(max_rows),
                             EP_MEMBER(recv_wait_ns), EP_MASK(active), EP_MASK(shown),
                             EP_MASK(dropped), EP_MASK(required), EP_MASK(slice_ns),
                             EP_MASK(silent_slices), EP_MASK(max_slices), EP_MEMBER(layout_call),
                             EP_MEMBER(resets_since_made), EP_MEMBER(is_flat)});
    return setters;
}

const auto& setters_of(const DispatchCallArgs&) {
    using A = DispatchCallArgs;
    static const auto setters = with_transfer<A>({EP_MEMBER(fills_tables),
                                                  EP_MEMBER(x),
                                                  EP_MEMBER(scales),
                                                  EP_MEMBER(weights),
                                                  EP_MEMBER(recv_x),
                                                  EP_MEMBER(recv_scales),
                                                  EP_MEMBER(recv_weights),
                                                  EP_MEMBER(has_intra_rank_pass),
                                                  EP_MEMBER(clears_end),
                                                  EP_MEMBER(clears_padding),
                                                  EP_MEMBER(has_all_weights),
                                                  EP_MEMBER(source_tokens),
                                                  EP_MEMBER(is_speculative),
                                                  EP_MEMBER(min_rows),
                                                  EP_MEMBER(topk_idx),
                                                  EP_MEMBER(index_bytes),
                                                  EP_MEMBER(expert_alignment),
                                                  EP_MEMBER(expert_capacity),
                                                  EP_MEMBER(tokens_per_expert),
                                                  EP_MEMBER(allows_repeats)});
    return setters;
}
const auto& setters_of(const CombineArgs&) {
    using A = CombineArgs;
    static const auto setters =
        with_transfer<A>({EP_MEMBER(is_weighted), EP_MEMBER(x), EP_MEMBER(weights), EP_MEMBER(y),
                          EP_MEMBER(y_weights), EP_MEMBER(row_weights), EP_MEMBER(sums),
                          EP_SETTER("bias", set_bias<0>), EP_SETTER("second_bias", set_bias<1>)});
    return setters;
}
const auto& setters_of(const LowLatencyDispatchArgs&) {
    using A = LowLatencyDispatchArgs;
    static const auto setters = with_low_latency<A>(
        {EP_MEMBER(topk_idx), EP_MEMBER(index_bytes), EP_MEMBER(expert_alignment),
         EP_MEMBER(expert_rows), EP_MEMBER(x), EP_MEMBER(scales), EP_MEMBER(weights),
         EP_MEMBER(recv_x), EP_MEMBER(recv_scales), EP_MEMBER(recv_weights), EP_MEMBER(quantize),
         EP_MEMBER(scale_column), EP_MEMBER(recv_rows), EP_MEMBER(tokens_per_expert),
         EP_MEMBER(max_received), EP_MEMBER(clears_weights), EP_MEMBER(recv_experts),
         EP_MEMBER(host_waits)});
    return setters;
}
const auto& setters_of(const LowLatencyCombineArgs&) {
    using A = LowLatencyCombineArgs;
    static const auto setters =
        with_low_latency<A>({EP_MEMBER(x), EP_MEMBER(values), EP_MEMBER(y), EP_MEMBER(y_values),
                             EP_MEMBER(sum_at_expert), EP_MEMBER(row_weights),
                             EP_MEMBER(token_weights), EP_MEMBER(renormalize)});
    return setters;
}

// A call's arguments. Each launch passes the values of the `per_launch` members, rank by rank; the
// others stay as they were set when the call was prepared.
template <class Args>
struct CallOf {
    std::vector<Args> args;
    std::vector<std::pair<std::string, Setter<Args>>> per_launch;

    AllArgs with(PyObject* values) const {
        if (as<size_t>(PyTuple_GET_SIZE(values)) != args.size() * per_launch.size())
            throw py::value_error("these are not the members that each launch must pass");
        auto filled = args;
        Py_ssize_t next = 0;
        for (Args& a : filled)
            for (const auto& [name, setter] : per_launch)
                setter(a, value_of(name, PyTuple_GET_ITEM(values, next++)));
        return filled;
    }
};
struct Call {
    std::variant<CallOf<DispatchCallArgs>, CallOf<CombineArgs>, CallOf<LowLatencyDispatchArgs>,
                 CallOf<LowLatencyCombineArgs>>
        of;
};

Call make_call(AllArgs blank, const std::vector<py::dict>& members,
               const std::vector<std::string>& per_launch) {
    return std::visit(
        [&]<class Args>(std::vector<Args>& args) {
            if (members.size() != args.size())
                throw py::value_error(std::to_string(members.size()) + " members, must be of " +
                                      std::to_string(args.size()) + " ranks");
            CallOf<Args> call{std::move(args), {}};
            const auto& setters = setters_of(Args{});
            for (const auto& name : per_launch)
                call.per_launch.emplace_back(name, setter_of(setters, name));
            for (size_t i = 0; i < members.size(); ++i) fill(call.args[i], setters, members[i]);
            return Call{std::move(call)};
        },
        blank);
}

// Sets Python's error for a BusyError.
void set_busy_error() noexcept try {
    PyErr_SetNone(py::module_::import("megatron_ep.errors").attr("BusyError").ptr());
} catch (py::error_already_set& error) {
    error.restore();
}

// Every call of the package comes through here: METH_FASTCALL takes less time than pybind11.
PyObject* launch(PyObject* self, PyObject* const* arguments, Py_ssize_t count) try {
    if (count != 4 || !PyTuple_Check(arguments[3]))
        throw py::type_error("launch takes a call, a phase, a stream and a tuple of members");
    auto& launcher = py::cast<Launcher&>(py::handle(self));
    const auto& call = py::cast<const Call&>(py::handle(arguments[0]));
    const auto phase = static_cast<Phase>(number(arguments[1]));
    auto* stream = reinterpret_cast<void*>(number(arguments[2]));
    AllArgs args = std::visit([&](const auto& of) { return of.with(arguments[3]); }, call.of);
    Counted counted;
    {
        const py::gil_scoped_release release;
        counted = launcher.launch(phase, std::move(args), stream);
    }
    if (PyErr_Occurred()) return nullptr;
    if (counted.totals.empty()) Py_RETURN_NONE;
    return py::make_tuple(counted.totals, counted.fits).release().ptr();
} catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
} catch (const py::builtin_exception& error) {
    error.set_error();
    return nullptr;
} catch (const BusyError&) {
    set_busy_error();
    return nullptr;
} catch (const std::bad_alloc& error) {
    return PyErr_NoMemory();
} catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
} catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
}

PyMethodDef launch_method = {
    "launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch)), METH_FASTCALL,
    "launch(self, call, phase, stream, per_launch)\n\n"
    "Launches a phase of a call. per_launch: the values of the members that were named so when the "
    "call was prepared, rank by rank: numbers, tensors for their addresses, or None for 0. If the "
    "host waits for counts, returns each rank's totals, and whether a speculative dispatch had "
    "enough room."};

void bind_phase(py::module_& m) {
    py::enum_<Phase>(m, "Phase", "The part of a call that a launch carries out.")
        .value("notify", Phase::Notify)
        .value("dispatch", Phase::Dispatch)
        .value("dispatch_without_wait", Phase::DispatchWithoutWait)
        .value("speculative_dispatch", Phase::SpeculativeDispatch)
        .value("dispatch_retry", Phase::DispatchRetry)
        .value("combine", Phase::Combine)
        .value("send", Phase::Send)
        .value("receive", Phase::Receive)
        .value("send_and_receive", Phase::SendAndReceive);
}

void bind_rank_launcher(py::module_& m) {
    const auto release = py::call_guard<py::gil_scoped_release>();
    py::class_<RankLauncher, Launcher>(
        m, "RankLauncher", "The normal mode of a buffer's ranks that live in this process.")
        .def_readwrite("watch", &RankLauncher::watch,
                       "Called during a wait for a GPU's counts, which its exception ends.")
        .def(
            "aborted", [](RankLauncher& r) { return first_reason(r.group().aborted()); },
            "(outcome, rank) of the rank that gave up first, as far as this process has been told, "
            "or None.")
        .def("incidents",
             [](RankLauncher& r) {
                 std::vector<py::dict> all;
                 for (size_t i = 0; i < r.ranks().size(); ++i) {
                     const auto own = incidents_of(r.group().report(i));
                     all.insert(all.end(), own.begin(), own.end());
                 }
                 return all;
             })
        .def(
            "rank_statuses",
            [](RankLauncher& r) {
                std::vector<ControlBlock> blocks;
                {
                    const py::gil_scoped_release release;
                    blocks = r.group().control_blocks();
                }
                std::vector<py::dict> all;
                for (const ControlBlock& block : blocks) {
                    const int rank = r.group().first_in_reach() + static_cast<int>(all.size());
                    all.push_back(rank_status_of(rank, block));
                }
                return all;
            },
            "Returns the status of all reachable ranks.")
        .def(
            "waited",
            [](RankLauncher& r) {
                std::vector<std::pair<std::vector<uint64_t>, std::vector<uint64_t>>> all;
                for (size_t i = 0; i < r.ranks().size(); ++i) all.push_back(r.group().waited(i));
                return all;
            },
            release,
            "Returns, for each rank, the nanoseconds that it waited for each other one: in the "
            "last call, and in all calls since the last reset.")
        .def(
            "abort",
            [](RankLauncher& r, bool interrupted, bool failed, const std::string& reason) {
                r.group().abort(outcome_of(interrupted, failed), reason);
            },
            py::kw_only(), py::arg("interrupted"), py::arg("failed"), py::arg("reason"), release)
        .def(
            "note_refusal",
            [](RankLauncher& r, uint64_t number, uint64_t word) {
                r.group().note_refusal(number, word);
            },
            py::arg("number"), py::arg("word"))
        .def("finished", [](RankLauncher& r) { return r.group().finished(); })
        .def_property_readonly("seconds", &RankLauncher::seconds)
        .def(
            "listen", [](RankLauncher& r) { r.group().listen(); }, release,
            "Makes aborted() include ranks that gave up while no kernel of this process ran.")
        .def(
            "drain", [](RankLauncher& r) { r.group().drain(); }, release)
        .def(
            "note_capture",
            [](RankLauncher& r, uintptr_t stream) { r.group().note_capture(as<void*>(stream)); },
            py::arg("stream"), "Must be called before launches on a stream that is being captured.")
        .def(
            "graphs", [](RankLauncher& r) { return r.group().graphs(); },
            "Returns the number of CUDA graphs that may replay these launches.")
        .def(
            "orders_graphs", [](RankLauncher& r) { return r.group().orders_graphs(); },
            "Returns whether combine can have an intra-rank pass in a CUDA graph, which needs a "
            "driver of CUDA 12.3.")
        .def(
            "retire", [](RankLauncher& r) { r.group().retire(); }, release,
            "Called when all launches are done. Later replays of graphs only fill their outputs "
            "with NaN, or -1 in integers.");
}

}  // namespace

void bind_launcher(py::module_& m) {
    bind_phase(m);
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            std::rethrow_exception(thrown);
        } catch (const BusyError&) {
            set_busy_error();
        }
    });
    py::class_<Call>(m, "Call", "The arguments of a call, except those that each launch passes.");
    py::class_<Launcher> launcher(m, "Launcher", "Launches calls on the ranks of this process.");
    launcher
        .def(
            "prepare_dispatch",
            [](const Launcher& l, const RowFormat& format, const std::vector<py::dict>& members,
               const std::vector<std::string>& per_launch) {
                return make_call(l.dispatch_args(format), members, per_launch);
            },
            py::arg("format"), py::arg("members"),
            py::arg("per_launch") = std::vector<std::string>(),
            "members: of each rank, by their names in the kernel's arguments; the rest is 0.")
        .def(
            "prepare_combine",
            [](const Launcher& l, const RowFormat& format, const std::vector<py::dict>& members,
               const std::vector<std::string>& per_launch) {
                return make_call(l.combine_args(format), members, per_launch);
            },
            py::arg("format"), py::arg("members"),
            py::arg("per_launch") = std::vector<std::string>())
        .def("reset", &Launcher::reset, py::call_guard<py::gil_scoped_release>());
    auto* type = reinterpret_cast<PyTypeObject*>(launcher.ptr());
    launcher.attr("launch") =
        py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &launch_method));
    bind_rank_launcher(m);
    py::class_<LowLatencyLauncher, Launcher>(
        m, "LowLatencyLauncher", "The low-latency mode of a buffer's ranks in this process.")
        .def_property_readonly("warps", &LowLatencyLauncher::warps);
}

}  // namespace ep
