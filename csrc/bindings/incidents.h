#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/incident.h"

namespace ep {

// How incidents are shown to users.
const char* name(Role role);
const char* name(Outcome outcome);
const char* name_of_wait(uint64_t wait);
pybind11::dict describe(const Incident& incident);
// Why the host of a rank ends the waits of all.
Outcome outcome_of(bool interrupted, bool failed);
// Who gave up first, and why, by an abort word; nothing for 0.
std::optional<std::pair<const char*, int>> first_reason(uint64_t abort_word);
// Those of a control block that can be read, as far as it is known that others are still written.
std::vector<pybind11::dict> incidents_of(const ControlBlock& block);
// What others can see of a rank: see buffer/interface.py.
pybind11::dict rank_status_of(int rank, const ControlBlock& block);

}  // namespace ep
