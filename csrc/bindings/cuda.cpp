#if defined(MEGATRON_EP_CUDA)

#include <stdexcept>
#include <string>

#include "bindings/cuda_launcher.h"
#include "bindings/members.h"
#include "bindings/module.h"
#include "fabric/cuda/device_memory.h"
#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/quantize.h"

namespace py = pybind11;

namespace ep {
namespace {

// Returns the fabric over the heaps of all ranks.
P2pFabricParams fabric_over(const Topology& topology, const std::vector<DeviceMemory*>& memories) {
    P2pFabricParams fabric{topology, {}};
    for (size_t rank = 0; rank < memories.size(); ++rank)
        fabric.heaps[rank] = memories[rank]->data();
    return fabric;
}

std::vector<char*> data_of(const std::vector<DeviceMemory*>& memories,
                           const std::vector<int>& ranks) {
    std::vector<char*> heaps;
    for (const int rank : ranks) heaps.push_back(memories[rank]->data());
    return heaps;
}

MemoryKind kind_named(const std::string& name) {
    if (name == "ipc") return MemoryKind::Ipc;
    if (name == "descriptor") return MemoryKind::Descriptor;
    if (name == "fabric") return MemoryKind::Fabric;
    throw std::invalid_argument("kind is " + name + ", must be ipc, descriptor or fabric");
}

std::unique_ptr<RankLauncher> p2p_launcher(const Heap& heap, const std::vector<int>& ranks,
                                           const std::vector<DeviceMemory*>& memories, int device,
                                           int num_sms, double timeout) {
    if (memories.size() > kMaxNodeRanks) {
        throw std::invalid_argument("ranks that share memory: " + std::to_string(memories.size()) +
                                    ", at most " + std::to_string(kMaxNodeRanks));
    }
    const P2pFabricParams fabric = fabric_over(heap.topology, memories);
    return std::make_unique<CudaLauncher<P2pFabricParams>>(
        heap, fabric, ranks, data_of(memories, ranks),
        std::vector<char*>(fabric.heaps, fabric.heaps + memories.size()), device, num_sms, timeout);
}

std::unique_ptr<LowLatencyLauncher> p2p_low_latency(RankLauncher& launcher,
                                                    const LowLatencyHeap& heap,
                                                    const std::vector<DeviceMemory*>& memories,
                                                    int blocks) {
    return std::make_unique<CudaLowLatencyLauncher<P2pFabricParams>>(
        launcher_of<P2pFabricParams>(launcher), heap, fabric_over(heap.topology, memories),
        data_of(memories, launcher.ranks()), blocks);
}

void bind_conversion(py::module_& m, const char* name,
                     void (*convert)(const QuantizeArgs&, void*)) {
    m.def(
        name,
        [convert](int64_t rows, int hidden, int dtype, uintptr_t reals, uintptr_t values,
                  uintptr_t scales, int value_format, ScaleFormat scale_format, uintptr_t stream) {
            convert(
                {rows, hidden, static_cast<DType>(dtype), as<void*>(reals), as<uint8_t*>(values),
                 as<float*>(scales), static_cast<ValueFormat>(value_format), scale_format},
                as<void*>(stream));
        },
        py::kw_only(), py::arg("rows"), py::arg("hidden"), py::arg("dtype"), py::arg("reals"),
        py::arg("values"), py::arg("scales"), py::arg("value_format"), py::arg("scale_format"),
        py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_cuda(py::module_& m) {
    bind_run_deferred(m);
    py::class_<DeviceMemory>(m, "DeviceMemory",
                             "Memory of a GPU that holds the symmetric heap of one rank.")
        .def_static(
            "create",
            [](int device, size_t bytes, const std::string& group, const std::string& kind) {
                return DeviceMemory::create(device, bytes, group, kind_named(kind));
            },
            py::arg("device"), py::arg("bytes"), py::arg("group") = "", py::arg("kind") = "ipc",
            "Returns zeroed memory. group: names the processes that may map it, and those that may "
            "reuse it. kind: how they map it: ipc, descriptor or fabric.")
        .def_static(
            "open",
            [](int device, const py::bytes& handle, size_t bytes, const std::string& kind) {
                return DeviceMemory::open(device, handle, bytes, kind_named(kind));
            },
            py::arg("device"), py::arg("handle"), py::arg("bytes"), py::arg("kind") = "ipc",
            "Maps the memory of another process.")
        .def(
            "handle", [](DeviceMemory& memory) { return py::bytes(memory.handle()); },
            "Returns what `open` needs in another process. Of kind descriptor: the bytes of an "
            "int, a new descriptor, which the caller closes.")
        .def("clear", &DeviceMemory::clear, py::call_guard<py::gil_scoped_release>())
        .def(
            "replace",
            [](DeviceMemory& memory, const py::bytes& handle) { memory.replace(handle); },
            py::arg("handle"), "Maps another process's memory in this one's place.")
        .def("release", &DeviceMemory::release, py::call_guard<py::gil_scoped_release>(),
             "Frees own memory, which nobody may map any more, or unmaps another process's.")
        .def("release_left", &DeviceMemory::release_left, py::call_guard<py::gil_scoped_release>(),
             "Frees what closed heaps of its group have left on its GPU, which nobody may map.")
        .def("add_one", &add_one, py::call_guard<py::gil_scoped_release>(),
             "Adds one to the first 8 bytes by a system-wide atomic of a kernel.")
        .def("first_word", &first_word, py::call_guard<py::gil_scoped_release>(),
             "Returns the first 8 bytes as an integer.")
        .def_property_readonly("is_released", &DeviceMemory::is_released)
        .def_property_readonly("bytes", &DeviceMemory::bytes);

    m.def("cuda_launcher", &p2p_launcher, py::kw_only(), py::arg("heap"), py::arg("ranks"),
          py::arg("memories"), py::arg("device"), py::arg("num_sms"), py::arg("timeout"),
          py::keep_alive<0, 3>(), "Returns the launcher of ranks on one GPU.");
    m.def("cuda_low_latency", &p2p_low_latency, py::kw_only(), py::arg("launcher"), py::arg("heap"),
          py::arg("memories"), py::arg("blocks"), py::keep_alive<0, 1>(), py::keep_alive<0, 3>());

    m.def("has_native_atomics", &has_native_atomics, py::arg("device"), py::arg("peer"),
          "Returns whether kernels on `device` have native atomics on the memory of `peer`.");

    bind_conversion(m, "quantize_cuda", quantize_cuda);
    bind_conversion(m, "dequantize_cuda", dequantize_cuda);
}

}  // namespace ep

#endif
