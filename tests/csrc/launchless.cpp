// The bindings of both modes on a GPU, whose launches launch nothing: tests/host_work.py measures
// what is left of a call.

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/cuda_launcher.h"

namespace py = pybind11;

namespace {

struct Nothing {
    static void pass() {}
};

using Heaps = std::vector<char*>;

}  // namespace

PYBIND11_MODULE(launchless, m) {
    py::module_::import("megatron_ep._C");
    m.def("group", [](const ep::Heap& heap) -> std::unique_ptr<ep::RankLauncher> {
        return std::make_unique<ep::CudaLauncher<Nothing>>(heap, Nothing{}, std::vector<int>{0},
                                                           Heaps{}, Heaps{}, 0, 1, 1.0);
    });
    m.def(
        "low_latency",
        [](ep::RankLauncher& ranks, const ep::LowLatencyHeap& heap,
           int blocks) -> std::unique_ptr<ep::LowLatencyLauncher> {
            return std::make_unique<ep::CudaLowLatencyLauncher<Nothing>>(
                ep::launcher_of<Nothing>(ranks), heap, Nothing{}, Heaps{}, blocks);
        },
        py::keep_alive<0, 1>());
}
