#pragma once

// The fabric between the ranks of a grid, as the program's definitions say.
#if defined(OVER_NCCL)
#include "nccl_ranks.h"
#elif defined(OVER_NVSHMEM)
#include "nvshmem_ranks.h"
#elif defined(OVER_QUEUE)
#include "queue_ranks.h"
#else
#include "p2p_ranks.h"
#endif
