#if defined(MEGATRON_EP_CUDA)

#include <pybind11/stl.h>

#include <memory>
#include <variant>
#include <vector>

#include "bindings/cuda_launcher.h"
#include "bindings/module.h"
#include "fabric/cuda/device_memory.h"
#include "fabric/shared_memory.h"
#include "launch/queue/queue_heap.h"

namespace py = pybind11;

namespace ep {
namespace {

using Memories = std::vector<DeviceMemory*>;  // heaps of a node's ranks, by local rank

std::unique_ptr<SoftwareNic> make_nic_of_gpu(int rank, const PinnedReport& report,
                                             const std::vector<Segment*>& mirrors,
                                             const SoftwareNic::Cards& cards) {
    std::vector<ControlBlock*> controls;
    for (const Segment* mirror : mirrors)
        controls.push_back(reinterpret_cast<ControlBlock*>(mirror->data()));
    controls[rank] = report.data();
    return std::make_unique<SoftwareNic>(rank, std::move(controls), cards);
}

std::unique_ptr<QueueHeap> make_queue_heap(
    SoftwareNic& nic, const PinnedReport& report,
    const std::variant<const Heap*, const LowLatencyHeap*>& heap, int rank, int device) {
    return std::visit(
        [&](const auto* mode) {
            return std::make_unique<QueueHeap>(nic, report, *mode, rank, device);
        },
        heap);
}

std::vector<char*> heaps_of(const Memories& memories) {
    std::vector<char*> data;
    for (const DeviceMemory* memory : memories) data.push_back(memory->data());
    return data;
}

std::unique_ptr<RankLauncher> queue_launcher(const Heap& heap, int rank, const QueueHeap& network,
                                             const Memories& memories, int device, int num_sms,
                                             double timeout) {
    return launcher_over(network.fabric(heaps_of(memories)), heap, rank, device, num_sms, timeout);
}

std::unique_ptr<LowLatencyLauncher> queue_low_latency(RankLauncher& launcher,
                                                      const LowLatencyHeap& heap,
                                                      const QueueHeap& network,
                                                      const Memories& memories, int blocks) {
    return low_latency_over(network.fabric(heaps_of(memories)), launcher, heap, blocks);
}

}  // namespace

void bind_queue(py::module_& m) {
    py::class_<PinnedReport>(m, "PinnedReport", "Control block in host memory of a rank on a GPU.")
        .def(py::init<int>(), py::arg("device"));

    m.def(
        "nic_of_gpu", &make_nic_of_gpu, py::kw_only(), py::arg("rank"), py::arg("report"),
        py::arg("mirrors"), py::arg("cards") = SoftwareNic::Cards(), py::keep_alive<0, 2>(),
        py::keep_alive<0, 3>(),
        "Returns the SoftwareNic of a rank on a GPU. mirrors: of all ranks; its own is not used.");

    py::class_<QueueHeap>(m, "QueueHeap",
                          "The part of a rank's heap that the network uses, and its send queues.")
        .def(py::init(&make_queue_heap), py::kw_only(), py::arg("nic"), py::arg("report"),
             py::arg("heap"), py::arg("rank"), py::arg("device"), py::keep_alive<1, 2>(),
             py::keep_alive<1, 3>());

    m.def("queue_launcher", &queue_launcher, py::kw_only(), py::arg("heap"), py::arg("rank"),
          py::arg("network"), py::arg("memories"), py::arg("device"), py::arg("num_sms"),
          py::arg("timeout"), py::keep_alive<0, 3>(), py::keep_alive<0, 4>(),
          "Returns the group of a rank on a GPU. memories: the heaps of its node, by local rank.");
    m.def("queue_low_latency", &queue_low_latency, py::kw_only(), py::arg("launcher"),
          py::arg("heap"), py::arg("network"), py::arg("memories"), py::arg("blocks"),
          py::keep_alive<0, 1>(), py::keep_alive<0, 3>(), py::keep_alive<0, 4>());

    m.def("try_card", &try_card, py::arg("card"), py::arg("device"),
          "Makes a queue of the card in which the GPU can post, and frees it. Raises RuntimeError "
          "that says what fails.");
}

}  // namespace ep

#endif
