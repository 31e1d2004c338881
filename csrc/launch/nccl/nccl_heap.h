#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fabric/nccl/nccl_fabric.h"

namespace ep {

// What a heap requires of an NCCL communicator.
struct NcclNeeds {
    Topology topology;
    size_t bytes;
    NetworkFlags flags;

    // Takes a Heap or LowLatencyHeap.
    template <class AnyHeap>
    static NcclNeeds of(const AnyHeap& heap) {
        return {heap.topology, heap.bytes(), heap.network_flags()};
    }
};

// Symmetric memory in an NCCL communicator that serves this heap alone. Destroying either waits for
// the other ranks, but a rank may end alone: so the destructor keeps both for the next heap of the
// same ranks. Setting up waits no longer than `timeout` seconds for the other ranks.
class NcclHeap {
  public:
    static int library_version();
    static std::string unique_id();  // for a new communicator: one rank makes it, all use it
    // Returns ids of kept communicators that fit. One that all ranks have may be used again.
    static std::vector<std::string> kept(const NcclNeeds& needs, int rank, int device);

    // Collective. Throws std::runtime_error if NCCL fails, std::invalid_argument if the topology is
    // not that of the machines.
    NcclHeap(const std::string& unique_id, const NcclNeeds& needs, int rank, int device,
             double timeout);
    const NcclFabricParams& fabric() const { return fabric_; }

    // Destroys the communicator and frees the memory. Collective, in the same order on all ranks,
    // with the timeout of setting up. Throws std::runtime_error if the other ranks do not come; the
    // communicator is then kept, but not used again.
    void release();
    const std::string& key() const { return unique_id_; }
    // Returns ids of all kept communicators; release_left does for one what release does.
    static std::vector<std::string> left();
    static void release_left(const std::string& unique_id);

  private:
    struct Connection;
    struct Keep {
        void operator()(Connection* connection) const;
    };
    static std::vector<Connection*>& all_kept();
    static void end(std::unique_ptr<Connection, Keep>& connection);

    std::string unique_id_;
    std::unique_ptr<Connection, Keep> connection_;
    NcclFabricParams fabric_;
};

}  // namespace ep
