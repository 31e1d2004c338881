#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "core/planned_layout.h"

namespace ep {

// Rows that go to random ranks, in a random order there, as all ranks know beforehand.
struct RandomMoves {
    std::vector<Move> moves;
    std::vector<int32_t> tokens;  // of each rank
    std::vector<int32_t> rows;    // that each rank gets
    int leaving;                  // see lay_out

    RandomMoves(std::mt19937_64& random, const Topology& topology, int max_tokens, int topk)
        : rows(topology.world()) {
        const int world = topology.world();
        auto pick = [&](int low, int high) {
            return low + static_cast<int>(random() % (high - low + 1));
        };
        std::vector<int> ranks(world);
        std::iota(ranks.begin(), ranks.end(), 0);
        for (int source = 0; source < world; ++source) {
            tokens.push_back(pick(0, 3) ? pick(0, max_tokens) : 0);
            for (int token = 0, count; token < tokens.back(); token += count) {
                count = std::min(pick(1, 4), tokens.back() - token);
                std::shuffle(ranks.begin(), ranks.end(), random);
                const int copies = pick(1, std::min(topk, world));
                std::sort(ranks.begin(), ranks.begin() + copies);
                for (int k = 0; k < copies; ++k)
                    moves.push_back({source, token, count, k, ranks[k], 0});
            }
        }
        std::vector<size_t> order(moves.size());
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        for (const size_t i : order) {
            Move& move = moves[i];
            move.place = rows[move.rank];
            rows[move.rank] += move.rows;
        }
        leaving = static_cast<int>(moves.size() % 17);
    }

    void lay_out(const Layout& layout, int rank, uint32_t epoch) const {
        ep::lay_out(layout, rank, moves.data(), moves.size(), tokens.data(), epoch, leaving);
    }
};

}  // namespace ep
