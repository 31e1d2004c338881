// The router, forward and backward: it chooses the experts of each token and weighs them.
#pragma once

#include "router/args.h"

namespace ep {

// Runs on at most max_threads threads of this process; few tokens take the caller's thread alone.
void router_forward_host(const RouterConfig& config, const RouterForward& args, int max_threads);
void router_backward_host(const RouterConfig& config, const RouterBackward& args, int max_threads);

// Enqueues on a CUDA stream of the current device. Throws std::invalid_argument if E is too large
// for the device's shared memory, std::runtime_error if the launch fails.
void router_forward_cuda(const RouterConfig& config, const RouterForward& args, void* stream);
void router_backward_cuda(const RouterConfig& config, const RouterBackward& args, void* stream);

}  // namespace ep
