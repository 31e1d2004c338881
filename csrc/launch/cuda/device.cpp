#include <cuda_runtime.h>

#include <algorithm>

#include "launch/cuda/error.h"
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

int cuda_channels(const Topology& topology, int sms) {
    // A receiver has more bytes to write than its sender: about as many rows as a token has experts on a node, against one.
    constexpr int kServers = 3;
    const int servers = std::max(fewest_servers(topology), std::min(kServers, topology.world()));
    const int warps = DispatchRoles{{topology.nodes, topology.world(), servers}}.warps();
    return std::max(1, sms * kBlockWarps / warps);
}

}  // namespace ep
