// Shows whether kernels reach the memory of a peer.
#pragma once

#include <cstdint>

#include "fabric/cuda/device_memory.h"

namespace ep {

// Adds one to the first 8 bytes, by a kernel's system-wide atomic on the GPU that mapped them, and
// waits for it. Throws std::runtime_error if the GPU cannot.
void add_one(const DeviceMemory& memory);
// Returns the first 8 bytes.
uint64_t first_word(const DeviceMemory& memory);

}  // namespace ep
