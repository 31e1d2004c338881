#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "exec/host/executor.h"
#include "tensor.h"

namespace ep {

// The ranks of a random program, in one process.
struct ProgramRanks {
    std::mt19937_64 random;
    Topology topology;
    std::vector<Tensor<char>> memory;
    std::vector<char*> heaps;
    std::vector<RankState> states;

    int pick(int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); }

    // block(rank): its control block, in its heap or elsewhere.
    template <class F>
    void make_ranks(size_t heap_bytes, F&& block) {
        std::vector<ControlBlock*> blocks;
        for (int rank = 0; rank < topology.world(); ++rank) {
            heaps.push_back(memory.emplace_back(heap_bytes).data());
            blocks.push_back(block(rank));
        }
        for (int rank = 0; rank < topology.world(); ++rank)
            states.push_back({rank, blocks[rank], blocks, std::chrono::seconds(60)});
    }

    bool aborted() const {
        return std::ranges::any_of(states, [](const RankState& state) { return state.aborted(); });
    }

    // As before the first call: what reset does, when nothing runs any more.
    void reset() {
        for (Tensor<char>& heap : memory) std::ranges::fill(heap, 0);
        for (RankState& state : states) {
            *state.control = {};
            state.unfinished = 0;
            state.stalled = false;
        }
    }
};

}  // namespace ep
