#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "bindings/module.h"
#include "fabric/shared_memory.h"
#include "tools/network/load.h"

namespace py = pybind11;

namespace ep {

void bind_network_load(py::module_& m) {
    using Seconds = NetworkLoad::Seconds;
    py::class_<NetworkLoad>(m, "NetworkLoad",
                            "Puts, signals and credits to see how a network does.")
        .def(py::init([](SoftwareNic& nic, const Segment& control, const Segment& heap, int rank,
                         int world, int channels, size_t max_bytes) {
                 const NetworkLoad::Sizes sizes{world, channels, max_bytes};
                 if (heap.bytes() < sizes.heap_bytes())
                     throw std::invalid_argument("the heap is too small");
                 return std::make_unique<NetworkLoad>(
                     nic, *reinterpret_cast<ControlBlock*>(control.data()), heap.data(), rank,
                     sizes);
             }),
             py::arg("nic"), py::arg("control"), py::arg("heap"), py::kw_only(), py::arg("rank"),
             py::arg("world"), py::arg("channels"), py::arg("max_bytes"), py::keep_alive<1, 2>(),
             py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
        .def_static(
            "heap_bytes",
            [](int world, int channels, size_t max_bytes) {
                return NetworkLoad::Sizes{world, channels, max_bytes}.heap_bytes();
            },
            py::kw_only(), py::arg("world"), py::arg("channels"), py::arg("max_bytes"))
        .def(
            "ping",
            [](NetworkLoad& load, int peer, bool begins, size_t bytes, int rounds, double timeout) {
                std::vector<double> seconds;
                for (const Seconds half : load.ping(peer, begins, bytes, rounds, Seconds(timeout)))
                    seconds.push_back(half.count());
                return seconds;
            },
            py::arg("peer"), py::kw_only(), py::arg("begins"), py::arg("bytes"), py::arg("rounds"),
            py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
        .def(
            "exchange",
            [](NetworkLoad& load, const std::vector<int>& targets, const std::vector<int>& sources,
               int puts, size_t bytes, std::optional<uint64_t> seed, double timeout) {
                return load.exchange(targets, sources, puts, bytes, seed, Seconds(timeout)).count();
            },
            py::kw_only(), py::arg("targets"), py::arg("sources"), py::arg("puts"),
            py::arg("bytes"), py::arg("seed") = py::none(), py::arg("timeout"),
            py::call_guard<py::gil_scoped_release>());
}

}  // namespace ep
