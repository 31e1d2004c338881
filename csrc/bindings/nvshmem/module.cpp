#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/cuda_group.h"
#include "launch/nvshmem/nvshmem_heap.h"

namespace py = pybind11;

namespace ep {
namespace {

using NvshmemGroup = PyCudaGroup<NvshmemFabricParams>;

std::unique_ptr<NvshmemGroup> make_group(const Heap& heap, int rank, const NvshmemHeap& memory, int device, int num_sms,
                                         double timeout) {
    const NvshmemFabricParams fabric = memory.fabric(heap.topology);
    const std::vector<char*> reachable(fabric.node, fabric.node + heap.topology.ranks_per_node);
    return std::make_unique<NvshmemGroup>(heap, fabric, std::vector<int>{rank}, std::vector<char*>{memory.data()},
                                          reachable, device, num_sms, timeout);
}

}  // namespace
}  // namespace ep

PYBIND11_MODULE(_nvshmem, m) {
    using namespace ep;
    py::module_::import("megatron_ep._C");  // has the types of the arguments
    m.doc() = "The CUDA backend over NVSHMEM. Its host library must have been loaded before: see megatron_ep.fabrics.";
    m.def("unique_id", [] { return py::bytes(NvshmemHeap::unique_id()); }, "Made by one rank, given to all: bytes.");
    py::class_<NvshmemHeap>(m, "NvshmemHeap",
                            "Symmetric memory of NVSHMEM that holds the heaps of a group's ranks. Collective.")
        .def(py::init([](const py::bytes& unique_id, int rank, int world, int device, size_t bytes) {
                 return std::make_unique<NvshmemHeap>(unique_id, rank, world, device, bytes);
             }),
             py::kw_only(), py::arg("unique_id"), py::arg("rank"), py::arg("world"), py::arg("device"),
             py::arg("bytes"));
    NvshmemGroup::bind(m, "NvshmemGroup", "The rank of a buffer that lives in this process.")
        .def(py::init(&make_group), py::kw_only(), py::arg("heap"), py::arg("rank"), py::arg("memory"),
             py::arg("device"), py::arg("num_sms"), py::arg("timeout"), py::keep_alive<1, 4>());
}
