#if defined(MEGATRON_EP_CUDA)

#include "bindings/cuda.h"

#include <stdexcept>
#include <string>

#include "bindings/cuda_group.h"
#include "bindings/cuda_low_latency.h"
#include "fabric/cuda/device_memory.h"
#include "fabric/cuda/p2p_fabric.h"
#include "launch/cuda/quantize.h"

namespace py = pybind11;

namespace ep {
namespace {

using P2pGroup = PyCudaGroup<P2pFabricParams>;

using P2pLowLatency = PyCudaLowLatency<P2pFabricParams>;

// Of the heaps of all ranks.
P2pFabricParams fabric_over(const Topology& topology, const std::vector<DeviceMemory*>& memories) {
    P2pFabricParams fabric{topology, {}};
    for (size_t rank = 0; rank < memories.size(); ++rank)
        fabric.heaps[rank] = memories[rank]->data();
    return fabric;
}

std::unique_ptr<P2pLowLatency> make_low_latency(const P2pGroup& group, const LowLatencyHeap& heap,
                                                const std::vector<DeviceMemory*>& memories,
                                                int blocks) {
    std::vector<char*> own_heaps;
    for (const int rank : group.group().ranks()) own_heaps.push_back(memories[rank]->data());
    return std::make_unique<P2pLowLatency>(group, heap, fabric_over(heap.topology, memories),
                                           own_heaps, blocks);
}

std::unique_ptr<P2pGroup> make_group(const Heap& heap, std::vector<int> ranks,
                                     const std::vector<DeviceMemory*>& memories, int device,
                                     int num_sms, double timeout) {
    if (memories.size() > kMaxNodeRanks) {
        throw std::invalid_argument("ranks that share memory: " + std::to_string(memories.size()) +
                                    ", at most " + std::to_string(kMaxNodeRanks));
    }
    const P2pFabricParams fabric = fabric_over(heap.topology, memories);
    std::vector<char*> own_heaps;
    const std::vector<char*> heaps(fabric.heaps, fabric.heaps + memories.size());
    for (int rank : ranks) own_heaps.push_back(heaps[rank]);
    return std::make_unique<P2pGroup>(heap, fabric, std::move(ranks), own_heaps, heaps, device,
                                      num_sms, timeout);
}

}  // namespace

void bind_cuda(py::module_& m) {
    bind_catch_up(m);
    py::class_<DeviceMemory>(m, "DeviceMemory",
                             "Memory of a GPU that holds the symmetric heap of one rank.")
        .def_static("create", &DeviceMemory::create, py::arg("device"), py::arg("bytes"),
                    py::arg("group") = "",
                    "group names the processes that may map it: theirs alone is the memory that is "
                    "left of it.")
        .def_static(
            "open",
            [](int device, const py::bytes& handle, size_t bytes) {
                return DeviceMemory::open(device, handle, bytes);
            },
            py::arg("device"), py::arg("handle"), py::arg("bytes"))
        .def(
            "handle", [](DeviceMemory& memory) { return py::bytes(memory.handle()); },
            "For `open` in another process of the machine.")
        .def("clear", &DeviceMemory::clear, py::call_guard<py::gil_scoped_release>())
        .def(
            "replace",
            [](DeviceMemory& memory, const py::bytes& handle) { memory.replace(handle); },
            py::arg("handle"), "Maps another process's memory in this one's place.")
        .def("release", &DeviceMemory::release, py::call_guard<py::gil_scoped_release>(),
             "Gives it back, or unmaps it. Nobody may use it any more, and nobody map own memory.")
        .def("release_left", &DeviceMemory::release_left, py::call_guard<py::gil_scoped_release>(),
             "Gives back what others of its group have left on its GPU, which nobody may map.")
        .def_property_readonly("is_released", &DeviceMemory::is_released)
        .def_property_readonly("bytes", &DeviceMemory::bytes);

    P2pGroup::bind(m, "CudaGroup",
                   "The ranks of a buffer that live in this process, on one GPU; all ranks' heaps "
                   "are mapped here.")
        .def(py::init(&make_group), py::kw_only(), py::arg("heap"), py::arg("ranks"),
             py::arg("memories"), py::arg("device"), py::arg("num_sms"), py::arg("timeout"),
             py::keep_alive<1, 4>());

    P2pLowLatency::bind(m, "CudaLowLatency")
        .def(py::init(&make_low_latency), py::kw_only(), py::arg("group"), py::arg("heap"),
             py::arg("memories"), py::arg("blocks"), py::keep_alive<1, 2>(),
             py::keep_alive<1, 4>());

    m.def("has_native_atomics", &has_native_atomics, py::arg("device"), py::arg("peer"),
          "Whether kernels on the one GPU have native atomics on the memory of the other.");

    m.def(
        "quantize_cuda",
        [](int64_t rows, int hidden, int dtype, Address x, Address values, Address scales,
           Address stream) {
            quantize_cuda({rows, hidden, static_cast<DType>(dtype), at<void>(x),
                           at<uint8_t>(values), at<float>(scales)},
                          at<void>(stream));
        },
        py::kw_only(), py::arg("rows"), py::arg("hidden"), py::arg("dtype"), py::arg("x"),
        py::arg("values"), py::arg("scales"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());

    m.def(
        "dequantize_cuda",
        [](int64_t rows, int hidden, int dtype, Address values, Address scales, Address out,
           Address stream) {
            dequantize_cuda({rows, hidden, static_cast<DType>(dtype), at<uint8_t>(values),
                             at<float>(scales), at<void>(out)},
                            at<void>(stream));
        },
        py::kw_only(), py::arg("rows"), py::arg("hidden"), py::arg("dtype"), py::arg("values"),
        py::arg("scales"), py::arg("out"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace ep

#endif
