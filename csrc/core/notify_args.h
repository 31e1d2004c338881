#pragma once

#include <vector>

#include "core/args.h"

namespace ep {

// The exchanges of counts of fused dispatches, a rank each. The epoch is counted on the GPU.
inline std::vector<NotifyArgs> notify_args(const std::vector<FusedDispatchArgs>& args) {
    std::vector<NotifyArgs> all;
    for (const FusedDispatchArgs& a : args) all.push_back(a.notify(0));
    return all;
}

}  // namespace ep
