#pragma once

#include <cstddef>
#include <cstdint>

#include "core/layout.h"

namespace ep {

// Rows that go together from one rank to another, as all ranks know beforehand. To the roles they
// are tokens, and a rank that they go to is its first expert.
struct Move {
    int32_t source, token;  // where they are, the first of them
    int32_t rows;
    int32_t k;            // which of their destinations this is
    int32_t rank, place;  // the destination, and where the first of them lies there
};

// Makes the layout that notify would have made on a rank, without asking anyone.
// layout: planned, as it will be used.
// moves: of all ranks; those of the same tokens one after the other, by rank. tokens: of each rank.
// epoch: by which ranks know that they mean the same moves; not 0.
// leaving: what a channel has to do for each rank but its own that a token goes to, where it has to
// do 1 for any token. Channels get equal shares.
void lay_out(const Layout& layout, int rank, const Move* moves, size_t count, const int32_t* tokens,
             uint32_t epoch, int leaving);

}  // namespace ep
