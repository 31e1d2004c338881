#pragma once

#include <pybind11/pybind11.h>

#include "core/incident.h"

namespace ep {

// How incidents are shown to users.
const char* name(Outcome outcome);
pybind11::dict describe(const Incident& incident);

}  // namespace ep
