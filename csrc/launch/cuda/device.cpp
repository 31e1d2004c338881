#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/runtime.h"
#include "launch/cuda/group.h"
#include "launch/cuda/joint.h"

namespace ep {

CudaDevice CudaDevice::of(int device) {
    CudaDevice gpu{};
    auto read = [device](int* value, cudaDeviceAttr attribute) {
        check_cuda(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
    };
    read(&gpu.sms, cudaDevAttrMultiProcessorCount);
    read(&gpu.major, cudaDevAttrComputeCapabilityMajor);
    read(&gpu.minor, cudaDevAttrComputeCapabilityMinor);
    return gpu;
}

int cuda_channels(const Topology& topology, int sms, int local_ranks) {
    // Rows of a channel pass through one sender, so channels are worth more than warps within one;
    // but a receiver writes a row to each of its experts where the sender writes it once, and with
    // several nodes more than one sender feeds it.
    const int enough = topology.nodes > 1 ? std::min(3, topology.world() / 2)
                       : local_ranks > 1  ? 4
                                          : 2;
    const int servers = even_servers(topology, std::max(fewest_servers(topology), enough));
    const int channels = std::max(
        1, sms * kBlockWarps / DispatchRoles{topology.nodes, topology.world(), servers}.warps());
    if (topology.nodes == 1 || local_ranks == 1) return channels;
    // Ranks that share a GPU share its cache, where about so many rings of two rows of 14 KB fit.
    // No such bound within one node: there combine, with one receiver a channel, loses more than
    // dispatch gains.
    constexpr int kRingsInCache = 1200, kFewest = 8;
    const int rings = local_ranks * (topology.world() + topology.nodes - 1);
    return std::min(channels, std::max(kFewest, kRingsInCache / rings));
}

}  // namespace ep
