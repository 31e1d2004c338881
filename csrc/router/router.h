#pragma once

#include "router/args.h"

namespace ep {

// On at most max_threads threads of this process; few tokens stay on the caller's.
void router_forward_host(const RouterConfig& config, const RouterForward& args, int max_threads);
void router_backward_host(const RouterConfig& config, const RouterBackward& args, int max_threads);

// Enqueued on the CUDA stream of the current device. Throws std::invalid_argument when E is too
// large for the device's shared memory, std::runtime_error when the launch fails.
void router_forward_cuda(const RouterConfig& config, const RouterForward& args, void* stream);
void router_backward_cuda(const RouterConfig& config, const RouterBackward& args, void* stream);

}  // namespace ep
