// The bindings of both modes on a GPU, whose launches launch nothing: tests/host_work.py measures
// what is left of a call.

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/cuda_group.h"
#include "bindings/cuda_low_latency.h"

namespace py = pybind11;

namespace {

struct Nothing {
    static void pass() {}
};

using Group = ep::PyCudaGroup<Nothing>;
using LowLatency = ep::PyCudaLowLatency<Nothing>;
using Heaps = std::vector<char*>;

}  // namespace

PYBIND11_MODULE(launchless, m) {
    py::module_::import("megatron_ep._C");
    Group::bind(m, "Group", "").def(py::init([](const ep::Heap& heap) {
        return std::make_unique<Group>(heap, Nothing{}, std::vector<int>{0}, Heaps{}, Heaps{}, 0, 1,
                                       1.0);
    }));
    LowLatency::bind(m, "LowLatency")
        .def(py::init([](const Group& group, const ep::LowLatencyHeap& heap, int blocks) {
                 return std::make_unique<LowLatency>(group, heap, Nothing{}, Heaps{}, blocks);
             }),
             py::keep_alive<1, 2>());
}
