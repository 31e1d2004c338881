#pragma once

#include <vector>

#include "bindings/cuda_group.h"
#include "bindings/low_latency_args.h"
#include "launch/cuda/low_latency.h"

namespace ep {

// A CudaLowLatency as Python sees it: the same methods as the host's LowLatencyGroup, plus a
// stream. Each fabric adds its constructor.
template <class FabricParams>
class PyCudaLowLatency {
  public:
    PyCudaLowLatency(const PyCudaGroup<FabricParams>& group, const LowLatencyHeap& heap,
                     const FabricParams& fabric, const std::vector<char*>& own_heaps, int blocks)
        : ranks_(group.group(), heap, fabric, own_heaps, blocks) {}

    void dispatch(const std::vector<LowLatencyTensors>& tensors, const RowFormat& format,
                  const LowLatencyOptions& options, LowLatencyLaunches launches, Address stream) {
        ranks_.dispatch(launches,
                        args_of_ranks(low_latency_dispatch_args, ranks_.heap(), ranks_.warps(),
                                      ranks_.ranks(), tensors, format, options),
                        at<void>(stream));
    }

    void combine(const std::vector<LowLatencyTensors>& tensors, const RowFormat& format,
                 const LowLatencyOptions& options, int dtype, LowLatencyLaunches launches,
                 Address stream) {
        ranks_.combine(launches,
                       args_of_ranks(low_latency_combine_args, ranks_.heap(), ranks_.warps(),
                                     ranks_.ranks(), tensors, format, options),
                       static_cast<DType>(dtype), at<void>(stream));
    }

    void reset() { ranks_.reset(); }
    int warps() const { return ranks_.warps(); }

    static pybind11::class_<PyCudaLowLatency> bind(pybind11::module_& m, const char* name) {
        namespace py = pybind11;
        const auto release = py::call_guard<py::gil_scoped_release>();
        return py::class_<PyCudaLowLatency>(
                   m, name, "The low-latency mode of the ranks that live in this process.")
            .def("dispatch", &PyCudaLowLatency::dispatch, py::arg("tensors"), py::arg("format"),
                 py::arg("options"), py::arg("launches"), py::arg("stream"), release)
            .def("combine", &PyCudaLowLatency::combine, py::arg("tensors"), py::arg("format"),
                 py::arg("options"), py::arg("dtype"), py::arg("launches"), py::arg("stream"),
                 release)
            .def_property_readonly("warps", &PyCudaLowLatency::warps)
            .def("reset", &PyCudaLowLatency::reset, release);
    }

  private:
    CudaLowLatency<FabricParams> ranks_;
};

}  // namespace ep
