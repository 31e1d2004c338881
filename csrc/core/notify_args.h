#pragma once

#include <vector>

#include "core/args.h"

namespace ep {

// Notify arguments of fused dispatches, one per rank. The GPU counts the epoch itself.
inline std::vector<NotifyArgs> notify_args(const std::vector<DispatchCallArgs>& args) {
    std::vector<NotifyArgs> all;
    for (const DispatchCallArgs& a : args) all.push_back(a.notify(0));
    return all;
}

}  // namespace ep
