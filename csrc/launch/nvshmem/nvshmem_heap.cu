#include <nvshmem.h>
#include <nvshmemx.h>

#include <chrono>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>

#include "launch/cuda/error.h"
#include "launch/nvshmem/nvshmem_heap.h"

namespace ep {
namespace {

// With a bootstrap but no GPU, initialisation reports success and stays at status 1.
constexpr int kInitialised = 2;

void initialise(const std::string& unique_id, int rank, int world) {
    if (nvshmemx_init_status() >= kInitialised) {
        if (nvshmem_n_pes() == world && nvshmem_my_pe() == rank) return;
        throw std::invalid_argument("NVSHMEM already serves a group of " + std::to_string(nvshmem_n_pes()) +
                                    " ranks in this process, not " + std::to_string(world) +
                                    " ranks with this one as rank " + std::to_string(rank));
    }
    int devices = 0;
    check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (unique_id.size() != sizeof(id)) {
        throw std::invalid_argument("unique_id has " + std::to_string(unique_id.size()) + " bytes, must have " +
                                    std::to_string(sizeof(id)));
    }
    std::memcpy(&id, unique_id.data(), sizeof(id));
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    int error = nvshmemx_set_attr_uniqueid_args(rank, world, &id, &attributes);
    if (!error) error = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
    if (error || nvshmemx_init_status() < kInitialised) {
        throw std::runtime_error("NVSHMEM could not be initialised: error " + std::to_string(error) + ", status " +
                                 std::to_string(nvshmemx_init_status()) + " (NVSHMEM_DEBUG=WARN says more)");
    }
}

// NVSHMEM's own wait for puts has no bound: it is left to the GPU, and this thread looks whether it is over.
__global__ void quiet_kernel() { nvshmem_quiet(); }

std::multimap<size_t, char*>& spare() {
    static std::multimap<size_t, char*> heaps;
    return heaps;
}

}  // namespace

void NvshmemFabricParams::drain(uint64_t timeout_ns) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    quiet_kernel<<<1, 1>>>();
    check_cuda(cudaGetLastError(), "kernel launch");
    for (cudaError_t state; (state = cudaStreamQuery(nullptr)) != cudaSuccess;) {
        if (state != cudaErrorNotReady) check_cuda(state, "nvshmem_quiet");
        if (std::chrono::steady_clock::now() > deadline)
            throw std::runtime_error("NVSHMEM: what this rank sent did not arrive in time");
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

std::string NvshmemHeap::unique_id() {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (const int error = nvshmemx_get_uniqueid(&id))
        throw std::runtime_error("nvshmemx_get_uniqueid: error " + std::to_string(error));
    return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

NvshmemHeap::NvshmemHeap(const std::string& unique_id, int rank, int world, int device, size_t bytes)
    : rank_(rank), bytes_(bytes) {
    const DeviceGuard guard(device);
    initialise(unique_id, rank, world);
    const auto found = spare().find(bytes);
    if (found != spare().end()) {
        data_ = found->second;
        spare().erase(found);
    } else {
        data_ = static_cast<char*>(nvshmem_malloc(bytes));
        if (!data_) {
            throw std::runtime_error("nvshmem_malloc of " + std::to_string(bytes) +
                                     " bytes of symmetric heap failed (see NVSHMEM_SYMMETRIC_SIZE)");
        }
    }
    nvshmem_barrier_all();  // nothing that was sent to an earlier heap here is still under way
    check_cuda(cudaMemset(data_, 0, bytes), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    nvshmem_barrier_all();
}

NvshmemHeap::~NvshmemHeap() { spare().emplace(bytes_, data_); }

NvshmemFabricParams NvshmemHeap::fabric(const Topology& topology) const {
    NvshmemFabricParams params{topology, data_, {}};
    if (topology.ranks_per_node > NvshmemFabricParams::kMaxNodeRanks) {
        throw std::invalid_argument("ranks_per_node is " + std::to_string(topology.ranks_per_node) + ", at most " +
                                    std::to_string(NvshmemFabricParams::kMaxNodeRanks));
    }
    for (int local = 0; local < topology.ranks_per_node; ++local) {
        const int rank = topology.rank(topology.node_of(rank_), local);
        params.node[local] = static_cast<char*>(nvshmem_ptr(data_, rank));
        if (!params.node[local]) {
            throw std::invalid_argument("rank " + std::to_string(rank_) + " cannot load and store the memory of rank " +
                                        std::to_string(rank) + ", which topology puts on the same node");
        }
    }
    return params;
}

}  // namespace ep
