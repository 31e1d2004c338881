#pragma once

#include "fabric/simulated.h"
#include "order.h"
#include "simt.h"

inline void __threadfence_system() { simt::order::fence(simt::order::Fence::System); }

// What NCCL's device API promises of GIN, for the ranks of one process, over a network that delays
// and reorders: a signal adds to a word of the receiver's context, after the puts before it to the
// same rank in the same context, in any order with other signals. Each context has its own words.
namespace simt {

struct Gin {
    static constexpr int kContexts = 2;

    ep::SimulatedNetwork network;
    std::mt19937_64 random;
    std::vector<char*> heaps;
    std::vector<std::vector<uint64_t>> signals;  // of each rank, context after context
    std::map<const uint64_t*, uint64_t> sent;    // what was added to each of them in all
};

}  // namespace simt

struct ncclDevComm {
    int rank, nRanks, lsaRank, lsaSize;
    int ginContextCount, ginSignalCount;
    simt::Gin* gin;
};
using ncclWindow_t = const void*;
struct ncclTeam {
    int nRanks, rank, stride;
};
inline ncclTeam ncclTeamWorld(const ncclDevComm& comm) { return {comm.nRanks, comm.rank, 1}; }

struct ncclCoopWarp {};
struct ncclCoopThread {};
struct ncclGin_None {};
struct ncclGin_SignalAdd {
    uint32_t signal;
    uint64_t value;
};

struct ncclGin {
    const ncclDevComm& comm;
    int context;

    ncclGin(const ncclDevComm& comm, int index) : comm(comm), context(index) {
        if (index >= comm.ginContextCount) simt::die("a context that there is not");
    }

    void put(ncclTeam team, int peer, ncclWindow_t to, size_t dst, ncclWindow_t from, size_t src,
             size_t bytes, ncclGin_None none, ncclGin_None, ncclCoopWarp) const {
        by_one_lane(
            [&] { put(team, peer, to, dst, from, src, bytes, none, none, ncclCoopThread{}); });
    }
    void put(ncclTeam team, int peer, ncclWindow_t to_window, size_t dst, ncclWindow_t from_window,
             size_t src, size_t bytes, ncclGin_None, ncclGin_None, ncclCoopThread) const {
        if (to_window != from_window) simt::die("a put between windows");
        char* to = comm.gin->heaps[peer] + dst;
        const char* from = comm.gin->heaps[comm.rank] + src;
        simt::order::Actor& puts = actor(team, peer);
        read_by(puts, puts.steps, from, bytes, simt::order::Fence::System);
        write_by(puts, puts.steps, to, bytes, simt::order::Fence::System);
        ++puts.steps;
        comm.gin->network.put(connection(team, peer), to, from, bytes);
    }
    void signal(ncclTeam team, int peer, ncclGin_SignalAdd add, ncclCoopWarp) const {
        by_one_lane([&] { signal(team, peer, add, ncclCoopThread{}); });
    }
    void signal(ncclTeam team, int peer, ncclGin_SignalAdd add, ncclCoopThread) const {
        uint64_t* to = &word(peer, add.signal);
        simt::order::signal(actor(team, peer), to, comm.gin->sent[to] += add.value);
        comm.gin->network.signal(connection(team, peer), to, add.value);
    }
    uint64_t readSignal(uint32_t signal) const {
        comm.gin->network.deliver(comm.gin->random);
        simt::yield();
        const uint64_t* own = &word(comm.rank, signal);
        simt::order::acquire_signal(own, *own);
        return *own;
    }
    void resetSignal(uint32_t signal) const {
        comm.gin->sent[&word(comm.rank, signal)] = word(comm.rank, signal) = 0;
    }

  private:
    template <class F>
    static void by_one_lane(F&& f) {
        __syncwarp();
        if (simt::lane() == 0) f();
        __syncwarp();
    }
    ep::SimulatedNetwork::Connection connection(ncclTeam team, int peer) const {
        if (team.stride != 1 || team.nRanks != comm.nRanks || peer == comm.rank)
            simt::die("a put to a wrong rank");
        return {comm.rank, peer, context};
    }
    simt::order::Actor& actor(ncclTeam team, int peer) const {
        const auto [from, to, channel] = connection(team, peer);
        return simt::order::actor({static_cast<uintptr_t>(from), static_cast<uintptr_t>(to),
                                   static_cast<uintptr_t>(channel)});
    }
    uint64_t& word(int rank, uint32_t signal) const {
        if (signal >= static_cast<uint32_t>(comm.ginSignalCount))
            simt::die("a signal that was not asked for");
        return comm.gin->signals[rank][static_cast<size_t>(context) * comm.ginSignalCount + signal];
    }
};
