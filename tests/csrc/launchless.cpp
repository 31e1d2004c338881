// The bindings of both modes on a GPU, whose launches launch nothing, but stop at a gate: between
// threads (test_binding_threads.py), and measured for what is left of a call (tests/host_work.py).

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "bindings/cuda_launcher.h"

namespace py = pybind11;

namespace {

struct Gate {
    static inline std::atomic<bool> is_open = true, is_reached = false, gave_up = false;

    static void pass() {
        if (is_open) return;
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
        is_reached = true;
        while (!is_open && !gave_up) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            gave_up = std::chrono::steady_clock::now() > deadline;
        }
    }
};

using Heaps = std::vector<char*>;

}  // namespace

PYBIND11_MODULE(launchless, m) {
    py::module_::import("megatron_ep._C");
    m.def("group", [](const ep::Heap& heap) -> std::unique_ptr<ep::RankLauncher> {
        return std::make_unique<ep::CudaLauncher<Gate>>(heap, Gate{}, std::vector<int>{0}, Heaps{},
                                                        Heaps{}, 0, 1, 1.0);
    });
    m.def(
        "low_latency",
        [](ep::RankLauncher& ranks, const ep::LowLatencyHeap& heap,
           int blocks) -> std::unique_ptr<ep::LowLatencyLauncher> {
            return std::make_unique<ep::CudaLowLatencyLauncher<Gate>>(
                ep::launcher_of<Gate>(ranks), heap, Gate{}, Heaps{}, blocks);
        },
        py::keep_alive<0, 1>());
    m.def("set_open", [](bool open) {
        Gate::is_open = open;
        Gate::is_reached = Gate::gave_up = false;
    });
    m.def("is_reached", [] { return Gate::is_reached.load(); });
    m.def("gave_up", [] { return Gate::gave_up.load(); });
}
