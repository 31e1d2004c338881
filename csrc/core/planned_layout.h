// Layouts that need no notify, because all ranks know beforehand which rows move where.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/layout.h"

namespace ep {

// Rows that move together from one rank to another, known to all ranks beforehand. To the roles
// they are tokens, and the first expert of the destination rank is their expert.
struct Move {
    int32_t source, token;  // source rank, and the first of its rows
    int32_t rows;
    int32_t k;            // index of this destination among those of the rows
    int32_t rank, place;  // destination rank, and the first row there
};

// Makes the layout that notify would have made on a rank, without communication.
// layout: planned, as it will be used.
// moves: of all ranks; those of the same tokens are adjacent, by rank. tokens: [W], of each rank.
// epoch: not 0; ranks with the same epoch have the same moves.
// leaving: a channel's work for each other rank that a token goes to, where any token costs 1.
// Channels get equal shares of the work.
void lay_out(const Layout& layout, int rank, const Move* moves, size_t count, const int32_t* tokens,
             uint32_t epoch, int leaving);

}  // namespace ep
