#pragma once

#include <cstddef>
#include <string>

#include "fabric/nvshmem/nvshmem_fabric.h"

namespace ep {

// Symmetric memory of NVSHMEM. Its library is initialised with the first heap of the process, for that heap's group of ranks; another group
// in the same process is refused. All members but data() are collective over the group, or return what a collective gave.
class NvshmemHeap {
  public:
    static std::string unique_id();  // made by one rank, given to all

    // Throws std::runtime_error when NVSHMEM cannot be initialised, std::invalid_argument when it serves another group.
    NvshmemHeap(const std::string& unique_id, int rank, int world, int device, size_t bytes);
    // Keeps the memory for the next heap of this size: freeing is collective, and a rank may end alone.
    ~NvshmemHeap();
    NvshmemHeap(const NvshmemHeap&) = delete;

    char* data() const { return data_; }
    // Throws std::invalid_argument when a rank of the own node is out of reach.
    NvshmemFabricParams fabric(const Topology& topology) const;

  private:
    int rank_;
    size_t bytes_;
    char* data_;
};

}  // namespace ep
