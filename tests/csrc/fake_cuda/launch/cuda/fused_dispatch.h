#pragma once

// Its kernel is named in kernels.h.
#include "launch/cuda/kernels.h"
