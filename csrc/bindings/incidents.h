#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/incident.h"

namespace ep {

// Incidents and control blocks as Python sees them.
const char* name(Role role);
const char* name(Outcome outcome);
const char* name_of_wait(uint64_t wait);
pybind11::dict describe(const Incident& incident);
// Returns the outcome with which the host of a rank aborts all ranks.
Outcome outcome_of(bool interrupted, bool failed);
// Decodes an abort word: (outcome, rank) of the rank that gave up first; nothing for 0.
std::optional<std::pair<const char*, int>> first_reason(uint64_t abort_word);
// Returns the incidents of a control block that are complete: kernels may still write others.
std::vector<pybind11::dict> incidents_of(const ControlBlock& block);
// Returns a rank's status as other ranks see it: see buffer/interface.py.
pybind11::dict rank_status_of(int rank, const ControlBlock& block);

}  // namespace ep
