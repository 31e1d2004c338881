#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/incident.h"

namespace ep {

// The ranks of a buffer that live in this process, as they are asked for failures and waits and
// told of their end. What only a GPU needs does nothing on the host.
class RankGroup {
  public:
    virtual ~RankGroup() = default;

    // Returns the abort word of the first rank to give up that this process knows of; 0: none.
    virtual uint64_t aborted() const = 0;
    virtual const ControlBlock& report(size_t index) const = 0;
    // Returns copies of the control blocks of the ranks in reach, from first_in_reach() on.
    virtual std::vector<ControlBlock> control_blocks() const = 0;
    virtual int first_in_reach() const { return 0; }
    // [world] nanoseconds of waiting in the last call, and in all calls: see Heap::waited.
    virtual std::pair<std::vector<uint64_t>, std::vector<uint64_t>> waited(size_t index) const = 0;
    // Ends the waits of all ranks in reach, also while roles run. The first reason since the last
    // reset stays. Thread-safe.
    virtual void abort(Outcome outcome, const std::string& reason) = 0;

    // ---- for the host only

    // Publishes a refused call.
    virtual void note_refusal(uint64_t, uint64_t) {}
    // Whether the last launch finished all its work on the ranks of this process. Another rank may
    // have given up later.
    virtual bool finished() const { return false; }

    // ---- for a GPU only

    // Makes aborted() include ranks that gave up while no kernel of this process ran. Thread-safe.
    virtual void listen() {}
    // Waits until what this process's ranks sent to other nodes has arrived. Throws
    // std::runtime_error after the timeout.
    virtual void drain() const {}
    // Counts the graph of a stream that is being captured, before launches on it: see graphs().
    virtual void note_capture(void*) {}
    // How many CUDA graphs may replay launches of this process's ranks, whose memory must stay.
    virtual int graphs() const { return 0; }
    // Whether combine may have an intra-rank pass in a graph: see SideStream.
    virtual bool orders_graphs() const { return true; }
    // Waits for all launches. Replays from now on do not use other ranks' memory, and fill their
    // outputs with Outputs::kPoison.
    virtual void retire() {}
};

}  // namespace ep
