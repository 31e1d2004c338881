#pragma once

#include <pybind11/pybind11.h>

namespace ep {

// The bindings of _C. Each function is defined in the file of its name.
void bind_heaps(pybind11::module_& m);
void bind_host_launcher(pybind11::module_& m);
void bind_launcher(pybind11::module_& m);
void bind_low_latency(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_network_load(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_router(pybind11::module_& m);
void bind_verbs(pybind11::module_& m);
// These two exist only in builds with CUDA.
void bind_cuda(pybind11::module_& m);
void bind_queue(pybind11::module_& m);

}  // namespace ep
