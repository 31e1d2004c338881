#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/cuda_group.h"
#include "launch/nccl/nccl_heap.h"

namespace py = pybind11;

namespace ep {
namespace {

using NcclGroup = PyCudaGroup<NcclFabricParams>;

std::unique_ptr<NcclGroup> make_group(const Heap& heap, int rank, const NcclHeap& memory,
                                      int device, int num_sms, double timeout) {
    const NcclFabricParams& fabric = memory.fabric();
    const std::vector<char*> reachable(fabric.node, fabric.node + heap.topology.ranks_per_node);
    return std::make_unique<NcclGroup>(heap, fabric, std::vector<int>{rank},
                                       std::vector<char*>{reachable[heap.topology.local_of(rank)]},
                                       reachable, device, num_sms, timeout);
}

}  // namespace
}  // namespace ep

PYBIND11_MODULE(_nccl, m) {
    using namespace ep;
    py::module_::import("megatron_ep._C");  // has the types of the arguments
    m.doc() =
        "The CUDA backend over NCCL's device API. Its library must have been loaded before: see "
        "megatron_ep.backends.fabrics.";
    m.attr("BUILT_FOR") = NCCL_VERSION_CODE;
    m.def("library_version", &NcclHeap::library_version,
          "Of the library that was loaded, as BUILT_FOR is written.");
    m.def(
        "unique_id", [] { return py::bytes(NcclHeap::unique_id()); },
        "Made by one rank, given to all: bytes.");
    m.def(
        "kept",
        [](const Heap& heap, int rank, int device) {
            std::vector<py::bytes> ids;
            for (const std::string& id : NcclHeap::kept(heap, rank, device)) ids.emplace_back(id);
            return ids;
        },
        py::kw_only(), py::arg("heap"), py::arg("rank"), py::arg("device"),
        "Ids of communicators that an earlier buffer left and this one can have, if all its ranks "
        "have them.");
    py::class_<NcclHeap>(
        m, "NcclHeap",
        "Symmetric memory of NCCL that holds the heaps of a group's ranks. Collective.")
        .def(py::init([](const py::bytes& unique_id, const Heap& heap, int rank, int device,
                         double timeout) {
                 const std::string id = unique_id;
                 py::gil_scoped_release release;  // it waits for the other ranks
                 return std::make_unique<NcclHeap>(id, heap, rank, device, timeout);
             }),
             py::kw_only(), py::arg("unique_id"), py::arg("heap"), py::arg("rank"),
             py::arg("device"), py::arg("timeout"));
    NcclGroup::bind(m, "NcclGroup", "The rank of a buffer that lives in this process.")
        .def(py::init(&make_group), py::kw_only(), py::arg("heap"), py::arg("rank"),
             py::arg("memory"), py::arg("device"), py::arg("num_sms"), py::arg("timeout"),
             py::keep_alive<1, 4>());
}
