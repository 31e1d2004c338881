#pragma once

#include "simt.h"

namespace ep {

inline char* dynamic_shared_memory() { return simt::block_memory(); }

}  // namespace ep
