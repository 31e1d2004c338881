#include <pybind11/stl.h>

#include "bindings/incidents.h"
#include "bindings/module.h"
#include "core/low_latency_args.h"

namespace py = pybind11;
using namespace py::literals;

namespace ep {
namespace {

void bind_low_latency_heap(py::module_& m) {
    py::class_<LowLatencyHeap>(m, "LowLatencyHeap",
                               "Layout of the low-latency mode's symmetric heap.")
        .def(py::init([](int nodes, int ranks_per_node, int num_experts, int max_tokens,
                         const RowFormat& largest, bool staged, int channels, bool masking,
                         bool lines, bool sums_at_expert) {
                 return LowLatencyHeap{{nodes, ranks_per_node},
                                       num_experts,
                                       max_tokens,
                                       largest.topk,
                                       largest.slot_bytes(),
                                       staged,
                                       channels,
                                       masking,
                                       lines,
                                       sums_at_expert};
             }),
             py::kw_only(), py::arg("nodes"), py::arg("ranks_per_node"), py::arg("num_experts"),
             py::arg("max_tokens"), py::arg("largest"), py::arg("staged"), py::arg("channels"),
             py::arg("masking"), py::arg("lines"), py::arg("sums_at_expert") = false)
        .def_property_readonly("bytes", &LowLatencyHeap::bytes)
        .def_readonly("max_tokens", &LowLatencyHeap::max_tokens)
        .def_readonly("lines", &LowLatencyHeap::lines)
        .def_property_readonly_static("overflow_offset",
                                      [](py::object) { return LowLatencyLayout::kOverflow; })
        .def(
            "layout",
            [](const LowLatencyHeap& heap, int topk, int warps) {
                const LowLatencyLayout layout{heap, topk, warps, nullptr};
                const size_t calls = (layout.size() + 1) / 2 * 2;  // aligned to 8 bytes
                const auto offset = [&](const void* part) {
                    return static_cast<const int32_t*>(part) - layout.data;
                };
                return py::dict(
                    "size"_a = calls + 4, "dispatch_call"_a = calls, "combine_call"_a = calls + 2,
                    "counts"_a = offset(&layout.count(0)), "starts"_a = offset(&layout.start(0)),
                    "experts"_a = offset(layout.experts(0)), "active"_a = offset(&layout.active(0)),
                    "present"_a = offset(&layout.present(0)),
                    "dst_rows"_a = offset(layout.dst_rows(0, 0)));
            },
            py::kw_only(), py::arg("topk"), py::arg("warps"),
            "Returns the size of a handle and the offsets of its parts, in int32. The numbers of "
            "its dispatch, and of a combine that is sent and received at once, follow the layout.");
}

void bind_scale_format(py::module_& m) {
    py::enum_<ScaleFormat>(m, "ScaleFormat", "How the scales of fp8 rows are rounded and stored.")
        .value("none", ScaleFormat::None)
        .value("fp32", ScaleFormat::Fp32)
        .value("pow2", ScaleFormat::PowerOf2)
        .value("ue8m0", ScaleFormat::Ue8m0);
}

}  // namespace

void bind_low_latency(py::module_& m) {
    bind_low_latency_heap(m);
    m.def("name_of_wait", &name_of_wait, py::arg("wait"),
          "Returns what a rank waited for, by the number that is shown for a masked rank.");
    bind_scale_format(m);
}

}  // namespace ep
