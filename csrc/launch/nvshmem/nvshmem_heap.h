#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fabric/nvshmem/nvshmem_fabric.h"

namespace ep {

// The ranks for which NVSHMEM's library was initialised, and which of them this process is.
struct NvshmemRanks {
    std::string unique_id;
    int rank, world;
};

// How NVSHMEM reaches the ranks of other nodes.
struct NvshmemTransport {
    int mapped;           // those whose memory this GPU loads and stores
    int networked;        // the others
    bool ibgda;           // its transport in which a GPU hands its puts to the network card
    bool writes_ordered;  // the GPU sees the network's writes in the order in which they are made
};

// Symmetric memory of NVSHMEM. Its library is initialised with the first heap of the process, for
// the ranks of that heap, and serves no others. Heaps are numbered as they were allocated, which
// all ranks did together, so a number is the same memory on all of them. Before a heap is made all
// ranks must have prepared, and agreed on what they have then.
class NvshmemHeap {
  public:
    static std::array<int, 3> library_version();  // of the one on the host
    static std::string unique_id();               // made by one rank, given to all
    // What can fail on one rank alone; returns when what this one has sent to heaps that are left
    // is there. Throws std::runtime_error, std::invalid_argument when NVSHMEM uses another GPU.
    static void prepare(int device, double timeout);
    static std::optional<NvshmemRanks> initialised_for();
    // Numbers of heaps of this size that are not in use.
    static std::vector<int> spare(size_t bytes);

    // Collective, waits for the other ranks without a bound, and leaves `device` current: for a
    // thread that is given up when that takes too long. Initialises NVSHMEM if it was not. Throws
    // std::runtime_error when that or the allocation fails.
    static std::unique_ptr<NvshmemHeap> allocate(const NvshmemRanks& ranks, int device,
                                                 size_t bytes);
    static std::unique_ptr<NvshmemHeap> reuse(int number, int device);  // a spare one
    // Numbers of heaps of any size that are not in use.
    static std::vector<int> left();
    // Gives one that is not in use back to NVSHMEM, as release() does.
    static void release_left(int number);

    // Keeps the memory for later heaps of this size: freeing is collective, and a rank may end
    // alone.
    ~NvshmemHeap();
    NvshmemHeap(const NvshmemHeap&) = delete;

    // Gives the memory back to NVSHMEM, whose symmetric heap keeps it for later heaps of any size.
    // Collective, in the same order on all ranks, for a thread as that of allocate.
    void release();

    int number() const { return memory_.number; }
    char* data() const { return memory_.data; }
    NvshmemTransport transport(const Topology& topology) const;
    // Throws std::invalid_argument when a rank of the own node is out of reach.
    NvshmemFabricParams fabric(const Topology& topology, bool needs_fence) const;

  private:
    struct Memory {
        int number;
        size_t bytes;
        char* data;
    };
    explicit NvshmemHeap(const Memory& memory) : memory_(memory) {}
    static std::vector<Memory>& all_spare();
    static void clear(const Memory& memory);
    static void free(char* data);

    Memory memory_;
};

}  // namespace ep
