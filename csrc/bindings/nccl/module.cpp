#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/cuda_launcher.h"
#include "launch/nccl/nccl_heap.h"

namespace py = pybind11;

namespace ep {
namespace {

std::unique_ptr<RankLauncher> launcher(const Heap& heap, int rank, const NcclHeap& memory,
                                       int device, int num_sms, double timeout) {
    return launcher_over(memory.fabric(), heap, rank, device, num_sms, timeout);
}

std::unique_ptr<LowLatencyLauncher> low_latency(RankLauncher& ranks, const LowLatencyHeap& heap,
                                                const NcclHeap& memory, int blocks) {
    return low_latency_over(memory.fabric(), ranks, heap, blocks);
}

template <class AnyHeap>
std::vector<py::bytes> kept(const AnyHeap& heap, int rank, int device) {
    std::vector<py::bytes> ids;
    for (const std::string& id : NcclHeap::kept(NcclNeeds::of(heap), rank, device))
        ids.emplace_back(id);
    return ids;
}

template <class AnyHeap>
std::unique_ptr<NcclHeap> make_heap(const py::bytes& unique_id, const AnyHeap& heap, int rank,
                                    int device, double timeout) {
    const std::string id = unique_id;
    const py::gil_scoped_release release;  // it waits for the other ranks
    return std::make_unique<NcclHeap>(id, NcclNeeds::of(heap), rank, device, timeout);
}

// Binds `kept` and the constructor for the heap of one mode.
template <class AnyHeap>
void bind_heap(py::module_& m, py::class_<NcclHeap>& memory) {
    m.def("kept", &kept<AnyHeap>, py::kw_only(), py::arg("heap"), py::arg("rank"),
          py::arg("device"),
          "Returns ids of communicators of closed buffers that this one can use if all its ranks "
          "have them.");
    memory.def(py::init(&make_heap<AnyHeap>), py::kw_only(), py::arg("unique_id"), py::arg("heap"),
               py::arg("rank"), py::arg("device"), py::arg("timeout"));
}

}  // namespace
}  // namespace ep

PYBIND11_MODULE(_nccl, m) {
    using namespace ep;
    py::module_::import("megatron_ep._C");  // binds the types of the arguments
    m.doc() =
        "The CUDA backend over NCCL's device API. Its library must have been loaded before: see "
        "megatron_ep.fabrics.choice.";
    bind_run_deferred(m);
    m.attr("BUILT_FOR") = NCCL_VERSION_CODE;
    m.def("library_version", &NcclHeap::library_version,
          "Returns the version of the loaded library, in the form of BUILT_FOR.");
    m.def(
        "unique_id", [] { return py::bytes(NcclHeap::unique_id()); },
        "Returns an id that one rank makes for all.");
    m.def(
        "left",
        [] {
            std::vector<py::bytes> ids;
            for (const std::string& id : NcclHeap::left()) ids.emplace_back(id);
            return ids;
        },
        "Returns the keys of the communicators that closed buffers have left.");
    m.def(
        "release_left",
        [](const py::bytes& key) {
            const std::string id = key;
            const py::gil_scoped_release release;
            NcclHeap::release_left(id);
        },
        py::arg("key"), "NcclHeap.release of a communicator that was left.");
    py::class_<NcclHeap> memory(
        m, "NcclHeap",
        "Symmetric memory of NCCL that holds the heaps of a group's ranks. Collective.");
    memory
        .def_property_readonly(
            "key", [](const NcclHeap& heap) { return py::bytes(heap.key()); },
            "A key that is equal on all ranks.")
        .def("release", &NcclHeap::release, py::call_guard<py::gil_scoped_release>(),
             "Ends the communicator and frees the memory. Collective, in the same order on all "
             "ranks.");
    bind_heap<Heap>(m, memory);
    bind_heap<LowLatencyHeap>(m, memory);
    m.def("group", &launcher, py::kw_only(), py::arg("heap"), py::arg("rank"), py::arg("memory"),
          py::arg("device"), py::arg("num_sms"), py::arg("timeout"), py::keep_alive<0, 3>());
    m.def("low_latency", &low_latency, py::kw_only(), py::arg("launcher"), py::arg("heap"),
          py::arg("memory"), py::arg("blocks"), py::keep_alive<0, 1>(), py::keep_alive<0, 3>(),
          py::call_guard<py::gil_scoped_release>());
}
