#include <non_abi/nvshmem_version.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>

#include "bindings/cuda_launcher.h"
#include "launch/nvshmem/nvshmem_heap.h"

namespace py = pybind11;

namespace ep {
namespace {

std::unique_ptr<RankLauncher> launcher(const Heap& heap, int rank, const NvshmemHeap& memory,
                                       int device, int num_sms, double timeout, bool fence) {
    return launcher_over(memory.fabric(heap.topology, fence), heap, rank, device, num_sms, timeout);
}

std::unique_ptr<LowLatencyLauncher> low_latency(RankLauncher& ranks, const LowLatencyHeap& heap,
                                                const NvshmemHeap& memory, int blocks) {
    const bool fence = launcher_of<NvshmemFabricParams>(ranks).group().fabric().needs_fence;
    return low_latency_over(memory.fabric(heap.topology, fence), ranks, heap, blocks);
}

}  // namespace
}  // namespace ep

PYBIND11_MODULE(_nvshmem, m) {
    using namespace ep;
    py::module_::import("megatron_ep._C");  // binds the types of the arguments
    m.doc() =
        "The CUDA backend over NVSHMEM. Its host library must have been loaded before: see "
        "megatron_ep.fabrics.choice.";
    bind_run_deferred(m);
    m.attr("BUILT_FOR") = py::make_tuple(NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                         NVSHMEM_VENDOR_PATCH_VERSION);
    m.def(
        "library_version", [] { return py::tuple(py::cast(NvshmemHeap::library_version())); },
        "Returns the version of the loaded library, in the form of BUILT_FOR.");
    m.def(
        "unique_id", [] { return py::bytes(NvshmemHeap::unique_id()); },
        "Returns an id that one rank makes for all.");
    m.def("prepare", &NvshmemHeap::prepare, py::kw_only(), py::arg("device"), py::arg("timeout"),
          py::call_guard<py::gil_scoped_release>(),
          "Does what can fail on one rank alone, and waits for all that it has sent. Called before "
          "the ranks agree on a heap.");
    m.def(
        "initialised_for",
        []() -> std::optional<std::tuple<py::bytes, int, int>> {
            const auto ranks = NvshmemHeap::initialised_for();
            if (!ranks) return std::nullopt;
            return std::tuple(py::bytes(ranks->unique_id), ranks->rank, ranks->world);
        },
        "Returns the (unique id, rank, number of ranks) for which this process has initialised "
        "NVSHMEM, or None.");
    m.def("spare", &NvshmemHeap::spare, py::kw_only(), py::arg("bytes"),
          "Returns the numbers of the heaps of this size that closed buffers have left.");
    m.def("left", &NvshmemHeap::left, "Returns the keys of heaps that closed buffers have left.");
    m.def("release_left", &NvshmemHeap::release_left, py::arg("key"),
          py::call_guard<py::gil_scoped_release>(), "NvshmemHeap.release of a heap that was left.");
    py::class_<NvshmemTransport>(m, "Transport", "See megatron_ep.fabrics.nvshmem_env.Transport.")
        .def_readonly("mapped", &NvshmemTransport::mapped)
        .def_readonly("networked", &NvshmemTransport::networked)
        .def_readonly("ibgda", &NvshmemTransport::ibgda)
        .def_readonly("writes_ordered", &NvshmemTransport::writes_ordered);
    py::class_<NvshmemHeap>(
        m, "NvshmemHeap",
        "Symmetric memory of NVSHMEM that holds the heaps of a group's ranks. Collective.")
        .def_static(
            "allocate",
            [](const py::bytes& unique_id, int rank, int world, int device, size_t bytes) {
                const NvshmemRanks ranks{unique_id, rank, world};
                py::gil_scoped_release release;
                return NvshmemHeap::allocate(ranks, device, bytes);
            },
            py::kw_only(), py::arg("unique_id"), py::arg("rank"), py::arg("world"),
            py::arg("device"), py::arg("bytes"),
            "Needs a thread of its own: waits for the other ranks without a bound, and leaves the "
            "device current.")
        .def(
            "transport",
            [](const NvshmemHeap& memory, const Heap& heap) {
                return memory.transport(heap.topology);
            },
            py::kw_only(), py::arg("heap"))
        .def_static("reuse", &NvshmemHeap::reuse, py::kw_only(), py::arg("number"),
                    py::arg("device"))
        .def_property_readonly("key", &NvshmemHeap::number, "A key that is equal on all ranks.")
        .def("release", &NvshmemHeap::release, py::call_guard<py::gil_scoped_release>(),
             "Returns the memory to NVSHMEM. Collective, in the same order on all ranks; needs a "
             "thread of its own, as `allocate` does.");
    m.def("group", &launcher, py::kw_only(), py::arg("heap"), py::arg("rank"), py::arg("memory"),
          py::arg("device"), py::arg("num_sms"), py::arg("timeout"), py::arg("fence"),
          py::keep_alive<0, 3>());
    m.def("low_latency", &low_latency, py::kw_only(), py::arg("launcher"), py::arg("heap"),
          py::arg("memory"), py::arg("blocks"), py::keep_alive<0, 1>(), py::keep_alive<0, 3>());
}
