// A launcher of a CudaGroup, over one that stops at a gate.

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
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
        is_reached = true;
        while (!is_open && !gave_up) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            gave_up = std::chrono::steady_clock::now() > deadline;
        }
    }
};

}  // namespace

PYBIND11_MODULE(binding_threads, m) {
    py::module_::import("megatron_ep._C");
    m.def("group", []() -> std::unique_ptr<ep::RankLauncher> {
        return std::make_unique<ep::CudaLauncher<Gate>>(ep::Heap{{1, 1}, 1, 1, 0, 0}, Gate{},
                                                        std::vector<int>{0}, std::vector<char*>{},
                                                        std::vector<char*>{}, 0, 1, 1.0);
    });
    m.def("set_open", [](bool open) {
        Gate::is_open = open;
        Gate::is_reached = Gate::gave_up = false;
    });
    m.def("is_reached", [] { return Gate::is_reached.load(); });
    m.def("gave_up", [] { return Gate::gave_up.load(); });
}
