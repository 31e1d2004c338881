#pragma once

#include <pybind11/pybind11.h>

#include <functional>

#include "launch/host/group.h"

namespace ep {

// The ranks of this process as others see them that launch on them, too.
class HostLauncher {
  public:
    virtual ~HostLauncher() = default;
    virtual HostGroup& host_group() = 0;
    // Runs a launch, without Python's lock: `run` gets what asks for Ctrl-C. Throws
    // std::runtime_error while another thread launches.
    virtual void launch_alone(
        const std::function<void(const std::function<bool()>& interrupted)>& run) = 0;
};

void bind_group(pybind11::module_& m);

}  // namespace ep
