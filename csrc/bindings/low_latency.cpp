#include "bindings/low_latency.h"

#include <pybind11/stl.h>

#include "bindings/group.h"
#include "bindings/incidents.h"
#include "bindings/low_latency_args.h"
#include "fabric/shared_memory.h"
#include "launch/host/low_latency.h"

namespace py = pybind11;

namespace ep {
namespace {

class LowLatencyGroup {
  public:
    LowLatencyGroup(HostLauncher& launcher, const LowLatencyHeap& heap,
                    const std::vector<Segment*>& segments, int warps)
        : launcher_(launcher), ranks_(launcher.host_group(), heap, data_of(segments), warps) {}

    void dispatch(const std::vector<LowLatencyTensors>& tensors, const RowFormat& format,
                  const LowLatencyOptions& options, LowLatencyLaunches launches) {
        const auto args = args_of_ranks(low_latency_dispatch_args, ranks_.heap(), ranks_.warps(),
                                        ranks_.group().ranks(), tensors, format, options);
        launcher_.launch_alone([&](const auto& interrupted) {
            if (launches != LowLatencyLaunches::Receive) ranks_.dispatch_send(args, interrupted);
            if (launches != LowLatencyLaunches::Send) ranks_.dispatch_receive(args, interrupted);
        });
    }

    void combine(const std::vector<LowLatencyTensors>& tensors, const RowFormat& format,
                 const LowLatencyOptions& options, int dtype, LowLatencyLaunches launches) {
        const auto args = args_of_ranks(low_latency_combine_args, ranks_.heap(), ranks_.warps(),
                                        ranks_.group().ranks(), tensors, format, options);
        const auto type = static_cast<DType>(dtype);
        launcher_.launch_alone([&](const auto& interrupted) {
            if (launches != LowLatencyLaunches::Receive)
                ranks_.combine_send(args, type, interrupted);
            if (launches != LowLatencyLaunches::Send)
                ranks_.combine_receive(args, type, interrupted);
        });
    }

    void reset() { ranks_.reset(); }

  private:
    static std::vector<char*> data_of(const std::vector<Segment*>& segments) {
        std::vector<char*> data;
        for (const Segment* segment : segments) data.push_back(segment->data());
        return data;
    }

    HostLauncher& launcher_;
    HostLowLatency ranks_;
};

void bind_low_latency_heap(py::module_& m) {
    py::class_<LowLatencyHeap>(m, "LowLatencyHeap",
                               "Layout of the low-latency mode's symmetric heap.")
        .def(py::init([](int nodes, int ranks_per_node, int num_experts, int max_tokens,
                         const RowFormat& largest, bool staged, int channels, bool masking,
                         bool lines) {
                 return LowLatencyHeap{{nodes, ranks_per_node},
                                       num_experts,
                                       max_tokens,
                                       largest.topk,
                                       largest.slot_bytes(),
                                       staged,
                                       channels,
                                       masking,
                                       lines};
             }),
             py::kw_only(), py::arg("nodes"), py::arg("ranks_per_node"), py::arg("num_experts"),
             py::arg("max_tokens"), py::arg("largest"), py::arg("staged"), py::arg("channels"),
             py::arg("masking"), py::arg("lines"))
        .def_property_readonly("bytes", &LowLatencyHeap::bytes)
        .def(
            "layout",
            [](const LowLatencyHeap& heap, int topk, int warps) {
                const LowLatencyLayout layout{heap, topk, warps, nullptr};
                const size_t calls = (layout.size() + 1) / 2 * 2;  // of 8 bytes each
                py::dict offsets;
                offsets["size"] = calls + 4;
                offsets["dispatch_call"] = calls;
                offsets["combine_call"] = calls + 2;
                offsets["overflow"] = LowLatencyLayout::kOverflow;
                offsets["counts"] = layout.counts_offset();
                offsets["starts"] = layout.starts_offset();
                offsets["experts"] = layout.experts_offset();
                offsets["active"] = layout.active_offset();
                offsets["present"] = layout.present_offset();
                offsets["dst_rows"] = layout.dst_rows_offset();
                return offsets;
            },
            py::kw_only(), py::arg("topk"), py::arg("warps"),
            "Number of int32 of a handle, and where its parts begin. Behind the layout: the "
            "numbers of its dispatch, and of a combine that is received when it is sent.");
}

void bind_low_latency_options(py::module_& m) {
    py::enum_<ScaleFormat>(m, "ScaleFormat", "How the scales of fp8 rows are rounded and stored.")
        .value("none", ScaleFormat::None)
        .value("fp32", ScaleFormat::Fp32)
        .value("pow2", ScaleFormat::PowerOf2)
        .value("ue8m0", ScaleFormat::Ue8m0);

    py::enum_<LowLatencyLaunches>(m, "LowLatencyLaunches", "What a launch does of a call.")
        .value("send", LowLatencyLaunches::Send)
        .value("receive", LowLatencyLaunches::Receive)
        .value("both", LowLatencyLaunches::Both);

    py::class_<LowLatencyOptions>(m, "LowLatencyOptions", "What all ranks of a call agree on.")
        .def(py::init<>())
        .def_readwrite("index_bytes", &LowLatencyOptions::index_bytes)
        .def_readwrite("expert_alignment", &LowLatencyOptions::expert_alignment)
        .def_readwrite("expert_rows", &LowLatencyOptions::expert_rows)
        .def_readwrite("quantize", &LowLatencyOptions::quantize)
        .def_readwrite("scale_column", &LowLatencyOptions::scale_column)
        .def_readwrite("sum_at_expert", &LowLatencyOptions::sum_at_expert)
        .def_readwrite("renormalize", &LowLatencyOptions::renormalize)
        .def_readwrite("slice_ns", &LowLatencyOptions::slice_ns)
        .def_readwrite("silent_slices", &LowLatencyOptions::silent_slices)
        .def_readwrite("max_slices", &LowLatencyOptions::max_slices);
}

}  // namespace

void bind_low_latency(py::module_& m) {
    bind_low_latency_heap(m);
    m.def("name_of_wait", &name_of_wait, py::arg("wait"),
          "For what a rank waited, by the number that is shown of a masked one.");
    bind_low_latency_options(m);
    py::class_<LowLatencyGroup>(m, "LowLatencyGroup",
                                "The low-latency mode of the ranks that live in this process.")
        .def(py::init<HostLauncher&, const LowLatencyHeap&, const std::vector<Segment*>&, int>(),
             py::kw_only(), py::arg("group"), py::arg("heap"), py::arg("segments"),
             py::arg("warps"), py::keep_alive<1, 2>(), py::keep_alive<1, 4>())
        .def("dispatch", &LowLatencyGroup::dispatch, py::arg("tensors"), py::arg("format"),
             py::arg("options"), py::arg("launches"))
        .def("combine", &LowLatencyGroup::combine, py::arg("tensors"), py::arg("format"),
             py::arg("options"), py::arg("dtype"), py::arg("launches"))
        .def("reset", &LowLatencyGroup::reset);
}

}  // namespace ep
