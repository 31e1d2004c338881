#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fabric/nvshmem/nvshmem_fabric.h"

namespace ep {

// The ranks for which NVSHMEM was initialised, and this process's rank among them.
struct NvshmemRanks {
    std::string unique_id;
    int rank, world;
};

// How NVSHMEM reaches the ranks of other nodes.
struct NvshmemTransport {
    int mapped;           // number of ranks whose memory this GPU loads and stores
    int networked;        // number of the others
    bool ibgda;           // whether the GPU posts its puts to the network card (IBGDA)
    bool writes_ordered;  // whether the GPU sees the network's writes in the order they are made
};

// Symmetric memory of NVSHMEM. The first heap of the process initialises the library, for the ranks
// of that heap and no others. Heaps are numbered in the order of their allocation, which is
// collective, so a number means the same heap on all ranks. Before they make a heap, all ranks must
// call prepare() and agree on which heaps are spare.
class NvshmemHeap {
  public:
    static std::array<int, 3> library_version();  // version of the host library
    static std::string unique_id();               // one rank makes it, all use it
    // Does what can fail on one rank alone, and waits until what this rank sent to earlier heaps
    // has arrived. Throws std::runtime_error, or std::invalid_argument if NVSHMEM uses another GPU.
    static void prepare(int device, double timeout);
    static std::optional<NvshmemRanks> initialised_for();
    // Returns the numbers of unused heaps of this size.
    static std::vector<int> spare(size_t bytes);

    // Collective. Waits for the other ranks without a bound and leaves `device` current, so callers
    // use a thread that they abandon after a timeout. Initialises NVSHMEM if necessary. Throws
    // std::runtime_error if that or the allocation fails.
    static std::unique_ptr<NvshmemHeap> allocate(const NvshmemRanks& ranks, int device,
                                                 size_t bytes);
    static std::unique_ptr<NvshmemHeap> reuse(int number, int device);  // a spare one
    // Returns the numbers of unused heaps of any size.
    static std::vector<int> left();
    // Does for an unused heap what release() does.
    static void release_left(int number);

    // Keeps the memory for later heaps: a rank may end alone, but freeing is collective.
    ~NvshmemHeap();
    NvshmemHeap(const NvshmemHeap&) = delete;

    // Frees the memory in NVSHMEM's symmetric heap, where later heaps of any size can use it.
    // Collective, in the same order on all ranks. It needs a thread as allocate does.
    void release();

    int number() const { return memory_.number; }
    char* data() const { return memory_.data; }
    NvshmemTransport transport(const Topology& topology) const;
    // Throws std::invalid_argument if the memory of a rank of this node is not mapped.
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
