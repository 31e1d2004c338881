#pragma once

#include <pybind11/pybind11.h>

namespace ep {

void bind_verbs(pybind11::module_& m);

}  // namespace ep
