#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "core/cuda/runtime.h"
#include "launch/cuda/resource.h"
#include "launch/nccl/nccl_heap.h"
#include "launch/nccl/reset_signals.h"

namespace ep {
namespace {

// GIN's proxy has 16 bits for the number of a signal.
constexpr size_t kMaxSignals = 1 << 16;
// Number of GIN contexts to request: NCCL 2.28 has no more.
constexpr int kContexts = 4;

using Clock = std::chrono::steady_clock;

// Waits for the calls that NCCL carries out in the background, until a deadline.
struct Setup {
    ncclComm_t& comm;
    Clock::time_point deadline;

    // Waits for the end of a call, which may report success when its work has only begun.
    void finish(ncclResult_t result, const std::string& what) const {
        ncclResult_t state = ncclInProgress;
        while (result == ncclSuccess || result == ncclInProgress) {
            result = ncclCommGetAsyncError(comm, &state);
            if (result == ncclSuccess && state == ncclSuccess) return;
            if (result == ncclSuccess) result = state;
            if (result != ncclInProgress) break;
            if (Clock::now() > deadline) {
                throw std::runtime_error(
                    what +
                    " was not done in time: other ranks did not come, or cannot be reached " +
                    "(NCCL_DEBUG=INFO says more)");
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        throw std::runtime_error(what + ": " + ncclGetErrorString(result) + ": " +
                                 ncclGetLastError(comm) + " (NCCL_DEBUG=INFO says more)");
    }
};

ncclUniqueId parse(const std::string& unique_id) {
    ncclUniqueId id;
    if (unique_id.size() != sizeof(id)) {
        throw std::invalid_argument("unique_id has " + std::to_string(unique_id.size()) +
                                    " bytes, must have " + std::to_string(sizeof(id)));
    }
    std::memcpy(&id, unique_id.data(), sizeof(id));
    return id;
}

__global__ void find_heaps(ncclWindow_t window, int first, int count, char** heaps) {
    const int local = threadIdx.x;
    if (local < count)
        heaps[local] = static_cast<char*>(ncclGetLsaPointer(window, 0, first + local));
}

}  // namespace

void NcclFabricParams::reset_signals(int rank, uint64_t timeout_ns) const {
    if (topology.nodes == 1) return;
    if (*broken) {
        throw std::runtime_error(
            "the connection over NCCL cannot be used any more: what it had sent did not arrive");
    }
    reset_signals_kernel<<<1, 32>>>(*this, rank, timeout_ns);
    check_cuda(cudaGetLastError(), "kernel launch");
    int found = 0;
    check_cuda(cudaMemcpy(&found, absent, sizeof(found), cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (found) {
        *broken = true;
        throw std::runtime_error("what rank " + std::to_string(found - 1) + " sent to rank " +
                                 std::to_string(rank) + " over the network did not arrive in time");
    }
}

struct NcclHeap::Connection {
    std::string id;
    int rank, world, device;
    size_t bytes, signals;
    double timeout;  // seconds for setting up, and for ending
    ncclComm_t comm = nullptr;
    void* data = nullptr;
    ncclWindow_t window = nullptr;
    ncclDevComm device_comm{};
    uint64_t* sent = nullptr;  // [signals], followed by `absent`
    bool broken = false;

    Clock::time_point deadline() const {
        return Clock::now() +
               std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
    }

    void connect() {
        const Setup setup{comm, deadline()};
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        config.commName = "megatron_ep";
        // The communicator runs no collectives, so NCCL should reserve little for them.
        config.minCTAs = config.maxCTAs = 1;
        setup.finish(ncclCommInitRankConfig(&comm, world, parse(id), rank, &config),
                     "ncclCommInitRankConfig");
        setup.finish(ncclMemAlloc(&data, bytes),
                     "ncclMemAlloc of " + std::to_string(bytes) + " bytes");
        setup.finish(ncclCommWindowRegister(comm, data, bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
                     "ncclCommWindowRegister");
        if (!window) {
            throw std::runtime_error(
                "NCCL has no symmetric memory for these ranks: every GPU of a machine must be a "
                "peer of the others "
                "(nvidia-smi topo -p2p r), and NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE must not be "
                "0");
        }
#if defined(NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER)  // from 2.29
        ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
        ncclDevCommRequirements needs{};
#endif
        needs.lsaMultimem = false;  // NVLink multicast is not used
        needs.ginForceEnable = signals > 0;
        needs.ginContextCount = signals > 0 ? kContexts : 0;
        needs.ginSignalCount = static_cast<int>(signals);
        const std::string gin =
            "several nodes need GIN, NCCL's puts from a GPU: network cards that it supports and "
            "NCCL_GIN_ENABLE not 0";
        setup.finish(ncclDevCommCreate(comm, &needs, &device_comm),
                     signals > 0 ? "ncclDevCommCreate (" + gin + ")" : "ncclDevCommCreate");
        if (signals > 0 && device_comm.ginContextCount == 0) {
            throw std::runtime_error("NCCL gave these ranks no GIN, and " + gin);
        }
        check_cuda(cudaMalloc(&sent, (signals + 1) * sizeof(uint64_t)), "cudaMalloc");
        check_cuda(cudaMemset(sent, 0, (signals + 1) * sizeof(uint64_t)), "cudaMemset");
    }

    void disconnect() {
        broken = true;  // in case a step fails
        const Setup ending{comm, deadline()};
        ending.finish(ncclDevCommDestroy(comm, &device_comm), "ncclDevCommDestroy");
        ending.finish(ncclCommWindowDeregister(comm, window), "ncclCommWindowDeregister");
        ending.finish(ncclMemFree(data), "ncclMemFree");
        check_cuda(cudaFree(sent), "cudaFree");
        ending.finish(ncclCommFinalize(comm), "ncclCommFinalize");
        const ncclResult_t result = ncclCommDestroy(comm);
        if (result != ncclSuccess) {
            throw std::runtime_error(std::string("ncclCommDestroy: ") + ncclGetErrorString(result));
        }
    }
};

std::vector<NcclHeap::Connection*>& NcclHeap::all_kept() {
    static std::vector<Connection*> connections;
    return connections;
}

int NcclHeap::library_version() {
    int version = 0;
    ncclGetVersion(&version);
    return version;
}

std::string NcclHeap::unique_id() {
    ncclUniqueId id;
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess)
        throw std::runtime_error(std::string("ncclGetUniqueId: ") + ncclGetErrorString(result));
    return std::string(id.internal, sizeof(id.internal));
}

std::vector<std::string> NcclHeap::kept(const NcclNeeds& needs, int rank, int device) {
    std::vector<std::string> ids;
    for (const Connection* c : all_kept()) {
        if (c->rank == rank && c->world == needs.topology.world() && c->device == device &&
            c->bytes == needs.bytes && c->signals == NcclFabricParams::signals(needs.flags) &&
            !c->broken)
            ids.push_back(c->id);
    }
    return ids;
}

std::vector<std::string> NcclHeap::left() {
    std::vector<std::string> ids;
    for (const Connection* c : all_kept()) {
        if (!c->broken) ids.push_back(c->id);
    }
    return ids;
}

void NcclHeap::end(std::unique_ptr<Connection, Keep>& connection) {
    if (!connection) return;
    const DeviceGuard guard(connection->device);
    connection->disconnect();
    delete connection.release();
}

void NcclHeap::release() { end(connection_); }

void NcclHeap::release_left(const std::string& unique_id) {
    const auto found = std::find_if(all_kept().begin(), all_kept().end(),
                                    [&](const Connection* c) { return c->id == unique_id; });
    if (found == all_kept().end())
        throw std::invalid_argument("no communicator of this id is kept");
    std::unique_ptr<Connection, Keep> connection(*found);
    all_kept().erase(found);
    end(connection);
}

NcclHeap::NcclHeap(const std::string& unique_id, const NcclNeeds& needs, int rank, int device,
                   double timeout)
    : unique_id_(unique_id) {
    const Topology& topology = needs.topology;
    const size_t signals = NcclFabricParams::signals(needs.flags);
    if (topology.ranks_per_node > kMaxNodeRanks) {
        throw std::invalid_argument("ranks_per_node is " + std::to_string(topology.ranks_per_node) +
                                    ", at most " + std::to_string(kMaxNodeRanks));
    }
    if (signals > kMaxSignals) {
        throw std::invalid_argument("channels is " + std::to_string(needs.flags.channels) +
                                    ": with " + std::to_string(topology.nodes) +
                                    " nodes that takes " + std::to_string(signals) +
                                    " signals of NCCL, at most " + std::to_string(kMaxSignals));
    }
    const DeviceGuard guard(device);
    const auto found = std::find_if(all_kept().begin(), all_kept().end(), [&](const Connection* c) {
        return c->id == unique_id && c->rank == rank;
    });
    if (found != all_kept().end()) {
        connection_.reset(*found);
        all_kept().erase(found);
    } else {
        // This leaks if connect throws, because NCCL may go on writing to it in the background.
        auto* connection = new Connection{unique_id,   rank,    topology.world(), device,
                                          needs.bytes, signals, timeout};
        connection->connect();
        connection_.reset(connection);
    }
    const ncclDevComm& comm = connection_->device_comm;
    fabric_ = {topology,
               needs.flags,
               comm,
               connection_->window,
               connection_->sent,
               reinterpret_cast<int*>(connection_->sent + signals),
               &connection_->broken,
               {}};
    const int first = topology.rank(topology.node_of(rank), 0);
    const int first_of_team = rank - comm.lsaRank;
    if (!topology.node_is_within(rank, first_of_team, comm.lsaSize)) {
        throw std::invalid_argument(
            "topology puts ranks " + std::to_string(first) + " to " +
            std::to_string(first + topology.ranks_per_node - 1) +
            " on one node, but NCCL's LSA team of rank " + std::to_string(rank) +
            ", who load and store each other's memory, is ranks " + std::to_string(first_of_team) +
            " to " + std::to_string(first_of_team + comm.lsaSize - 1));
    }
    const auto heaps = device_array<char*>(device, kMaxNodeRanks);
    find_heaps<<<1, kMaxNodeRanks>>>(fabric_.window, first - first_of_team, topology.ranks_per_node,
                                     heaps.get());
    check_cuda(cudaGetLastError(), "kernel launch");
    check_cuda(cudaMemcpy(fabric_.node, heaps.get(), topology.ranks_per_node * sizeof(char*),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    check_cuda(cudaMemset(fabric_.node[topology.local_of(rank)], 0, needs.bytes), "cudaMemset");
    synchronize_device();
}

void NcclHeap::Keep::operator()(Connection* connection) const { all_kept().push_back(connection); }

}  // namespace ep
