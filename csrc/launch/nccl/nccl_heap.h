#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fabric/nccl/nccl_fabric.h"

namespace ep {

// What a heap needs of NCCL.
struct NcclNeeds {
    Topology topology;
    size_t bytes;
    NetworkFlags flags;

    // Of Heap or LowLatencyHeap.
    template <class AnyHeap>
    static NcclNeeds of(const AnyHeap& heap) {
        return {heap.topology, heap.bytes(), heap.network_flags()};
    }
};

// Symmetric memory in an NCCL communicator of its own. Ending either is collective, or waits for
// the other ranks, and a rank may end alone: so both are kept, and serve the next heap of the same
// ranks. Setting up waits no longer than `timeout` seconds for the other ranks.
class NcclHeap {
  public:
    static int library_version();
    static std::string unique_id();  // of a new communicator: made by one rank, given to all
    // Of communicators that are kept and fit. One that all ranks have may be taken again.
    static std::vector<std::string> kept(const NcclNeeds& needs, int rank, int device);

    // Collective. Throws std::runtime_error when NCCL cannot do it, std::invalid_argument when the
    // topology is not that of the machines.
    NcclHeap(const std::string& unique_id, const NcclNeeds& needs, int rank, int device,
             double timeout);
    const NcclFabricParams& fabric() const { return fabric_; }

    // Ends the communicator and gives the memory back. Collective, in the same order on all ranks,
    // which it awaits as long as setting up did. Throws std::runtime_error when they do not come:
    // then it is kept, and serves nobody any more.
    void release();
    const std::string& key() const { return unique_id_; }
    // Of communicators that are kept, whatever they fit, and release() for one of them.
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
