#include "bindings/module.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

py::dict build_info() {
    py::dict info;
    info["compiler"] = __VERSION__;
#if defined(MEGATRON_EP_CUDA)
    info["backends"] = py::make_tuple("host", "cuda");
    info["cuda"] = MEGATRON_EP_CUDA_VERSION;
    info["architectures"] = MEGATRON_EP_ARCHITECTURES;
    info["dtypes"] = MEGATRON_EP_DTYPES;
#else
    info["backends"] = py::make_tuple("host");
    info["cuda"] = py::none();
    info["without cuda"] = MEGATRON_EP_WITHOUT_CUDA;
#endif
    return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() =
        "Compiled kernels of megatron_ep. Takes raw pointers; megatron_ep.buffer checks what they "
        "point to.";
    m.def("build_info", &build_info);
    ep::bind_verbs(m);
    ep::bind_heaps(m);
    ep::bind_low_latency(m);
    ep::bind_launcher(m);
    ep::bind_host_launcher(m);
    ep::bind_memory(m);
    ep::bind_network_load(m);
    ep::bind_plan(m);
    ep::bind_router(m);
#if defined(MEGATRON_EP_CUDA)
    ep::bind_cuda(m);
    ep::bind_queue(m);
#endif
}
