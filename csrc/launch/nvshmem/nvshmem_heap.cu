#include <nvshmem.h>
#include <nvshmemx.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/cuda/runtime.h"
#include "launch/cuda/resource.h"
#include "launch/nvshmem/nvshmem_heap.h"

namespace ep {
namespace {

// Status after initialisation. With a bootstrap but no GPU, it succeeds but stays at status 1.
constexpr int kInitialised = 2;

// Guards calls of NVSHMEM, which two threads must not make at the same time.
std::mutex setup;

std::optional<NvshmemRanks> ranks_served;
int device_used;

// nvshmemx_init_attr makes this call, which is not public, and calls exit(-1) if it fails.
static_assert(NVSHMEM_VENDOR_MAJOR_VERSION == 3 && NVSHMEM_VENDOR_MINOR_VERSION >= 4,
              "the nvshmem fabric is made for NVSHMEM 3, from 3.4 on: MEGATRON_EP_NVSHMEM=0 builds "
              "without it");
int initialise_library(nvshmemx_init_attr_t* attributes) {
    const nvshmemi_version_t version{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                     NVSHMEM_VENDOR_PATCH_VERSION};
    int provided = 0;
    return nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID,
                                attributes, version);
}

void initialise(const NvshmemRanks& ranks, int device) {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (ranks.unique_id.size() != sizeof(id)) {
        throw std::invalid_argument("unique_id has " + std::to_string(ranks.unique_id.size()) +
                                    " bytes, must have " + std::to_string(sizeof(id)));
    }
    std::memcpy(&id, ranks.unique_id.data(), sizeof(id));
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    int error = nvshmemx_set_attr_uniqueid_args(ranks.rank, ranks.world, &id, &attributes);
    if (!error) error = initialise_library(&attributes);
    if (error || nvshmemx_init_status() < kInitialised) {
        throw std::runtime_error(
            "NVSHMEM could not be initialised: error " + std::to_string(error) + ", status " +
            std::to_string(nvshmemx_init_status()) + " (NVSHMEM_DEBUG=WARN says more)");
    }
    ranks_served = ranks;
    device_used = device;
}

// Reads a state that only the library's device code has.
__global__ void read_ibgda(bool* is_initialised) {
    *is_initialised = nvshmemi_device_state_d.ibgda_is_initialized;
}

// Waits for all puts on the GPU: NVSHMEM's wait has no bound, so the host polls for its end.
__global__ void quiet_kernel() { nvshmem_quiet(); }

void quiet(std::chrono::nanoseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    quiet_kernel<<<1, 1>>>();
    check_cuda(cudaGetLastError(), "kernel launch");
    for (cudaError_t state; (state = cudaStreamQuery(nullptr)) != cudaSuccess;) {
        if (state != cudaErrorNotReady) check_cuda(state, "nvshmem_quiet");
        if (std::chrono::steady_clock::now() > deadline)
            throw std::runtime_error("NVSHMEM: what this rank sent did not arrive in time");
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

}  // namespace

void NvshmemFabricParams::drain(uint64_t timeout_ns) const {
    quiet(std::chrono::nanoseconds(timeout_ns));
}

std::array<int, 3> NvshmemHeap::library_version() {
    std::array<int, 3> version{};
    nvshmemx_vendor_get_version_info(&version[0], &version[1], &version[2]);
    return version;
}

std::string NvshmemHeap::unique_id() {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (const int error = nvshmemx_get_uniqueid(&id))
        throw std::runtime_error("nvshmemx_get_uniqueid: error " + std::to_string(error));
    return std::string(reinterpret_cast<const char*>(&id), sizeof(id));
}

void NvshmemHeap::prepare(int device, double timeout) {
    const std::unique_lock alone(setup, std::try_to_lock);
    if (!alone)
        throw std::runtime_error(
            "NVSHMEM still waits for ranks that did not come to an earlier buffer");
    if (ranks_served && device_used != device) {
        throw std::invalid_argument("device is cuda:" + std::to_string(device) +
                                    ", must be cuda:" + std::to_string(device_used) +
                                    ", which NVSHMEM uses in this process");
    }
    if (!ranks_served && nvshmemx_init_status() >= kInitialised)
        throw std::runtime_error(
            "NVSHMEM serves somebody else in this process, and can serve nobody besides");
    const DeviceGuard guard(device);
    check_cuda(cudaFree(nullptr), "making a context on the GPU");
    if (ranks_served)
        quiet(std::chrono::duration_cast<std::chrono::nanoseconds>(
            std::chrono::duration<double>(timeout)));
}

std::optional<NvshmemRanks> NvshmemHeap::initialised_for() { return ranks_served; }

std::vector<NvshmemHeap::Memory>& NvshmemHeap::all_spare() {
    static std::vector<Memory> memories;
    return memories;
}

std::vector<int> NvshmemHeap::spare(size_t bytes) {
    std::vector<int> numbers;
    for (const Memory& memory : all_spare()) {
        if (memory.bytes == bytes) numbers.push_back(memory.number);
    }
    return numbers;
}

std::unique_ptr<NvshmemHeap> NvshmemHeap::allocate(const NvshmemRanks& ranks, int device,
                                                   size_t bytes) {
    static int allocated = 0;
    const std::lock_guard alone(setup);
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    check_cuda(cudaFree(nullptr), "cudaFree");  // NVSHMEM looks for a context of the calling thread
    if (!ranks_served) initialise(ranks, device);
    auto* data = static_cast<char*>(nvshmem_malloc(bytes));
    if (!data) {
        throw std::runtime_error("nvshmem_malloc of " + std::to_string(bytes) +
                                 " bytes of symmetric heap failed (see NVSHMEM_SYMMETRIC_SIZE)");
    }
    const Memory memory{allocated++, bytes, data};
    clear(memory);
    return std::unique_ptr<NvshmemHeap>(new NvshmemHeap(memory));
}

std::unique_ptr<NvshmemHeap> NvshmemHeap::reuse(int number, int device) {
    const DeviceGuard guard(device);
    const auto found = std::find_if(all_spare().begin(), all_spare().end(),
                                    [&](const Memory& memory) { return memory.number == number; });
    if (found == all_spare().end())
        throw std::invalid_argument("heap " + std::to_string(number) + " is not spare");
    const Memory memory = *found;
    clear(memory);
    all_spare().erase(found);
    return std::unique_ptr<NvshmemHeap>(new NvshmemHeap(memory));
}

void NvshmemHeap::clear(const Memory& memory) {
    check_cuda(cudaMemset(memory.data, 0, memory.bytes), "cudaMemset");
    synchronize_device();
}

std::vector<int> NvshmemHeap::left() {
    std::vector<int> numbers;
    for (const Memory& memory : all_spare()) numbers.push_back(memory.number);
    return numbers;
}

void NvshmemHeap::free(char* data) {
    const std::lock_guard alone(setup);
    check_cuda(cudaSetDevice(device_used), "cudaSetDevice");
    check_cuda(cudaFree(nullptr), "cudaFree");  // as in allocate
    nvshmem_free(data);
}

void NvshmemHeap::release() {
    if (memory_.data) free(std::exchange(memory_.data, nullptr));
}

void NvshmemHeap::release_left(int number) {
    const auto found = std::find_if(all_spare().begin(), all_spare().end(),
                                    [&](const Memory& memory) { return memory.number == number; });
    if (found == all_spare().end())
        throw std::invalid_argument("heap " + std::to_string(number) + " is not spare");
    char* const data = found->data;
    all_spare().erase(found);
    free(data);
}

NvshmemHeap::~NvshmemHeap() {
    if (memory_.data) all_spare().push_back(memory_);
}

NvshmemTransport NvshmemHeap::transport(const Topology& topology) const {
    const DeviceGuard guard(device_used);
    NvshmemTransport transport{};
    const auto ibgda = device_array<bool>(device_used, 1);
    read_ibgda<<<1, 1>>>(ibgda.get());
    check_cuda(cudaGetLastError(), "kernel launch");
    check_cuda(cudaMemcpy(&transport.ibgda, ibgda.get(), sizeof(bool), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    const int own = ranks_served->rank;
    for (int rank = 0; rank < topology.world(); ++rank) {
        if (topology.node_of(rank) != topology.node_of(own))
            ++(nvshmem_ptr(memory_.data, rank) ? transport.mapped : transport.networked);
    }
    int ordering = cudaGPUDirectRDMAWritesOrderingNone;
    check_cuda(
        cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device_used),
        "cudaDeviceGetAttribute");
    transport.writes_ordered = ordering >= cudaGPUDirectRDMAWritesOrderingOwner;
    return transport;
}

NvshmemFabricParams NvshmemHeap::fabric(const Topology& topology, bool needs_fence) const {
    const int own = ranks_served->rank;
    NvshmemFabricParams params{topology, memory_.data, {}, needs_fence};
    if (topology.ranks_per_node > kMaxNodeRanks) {
        throw std::invalid_argument("ranks_per_node is " + std::to_string(topology.ranks_per_node) +
                                    ", at most " + std::to_string(kMaxNodeRanks));
    }
    for (int local = 0; local < topology.ranks_per_node; ++local) {
        const int rank = topology.rank(topology.node_of(own), local);
        params.node[local] = static_cast<char*>(nvshmem_ptr(memory_.data, rank));
        if (!params.node[local]) {
            throw std::invalid_argument(
                "rank " + std::to_string(own) + " cannot load and store the memory of rank " +
                std::to_string(rank) + ", which topology puts on the same node");
        }
    }
    return params;
}

}  // namespace ep
