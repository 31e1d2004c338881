#pragma once

#include <cstddef>

#include "core/function.h"

namespace ep {

// The flags of a heap that ranks of other nodes write, numbered without gaps, for fabrics that keep
// them elsewhere. They come in sets with one flag per writer: a node if flags go along a rail, else
// a rank. The first sets belong to no channel, the others to each channel in turn, or with by_pair
// to the channel of the flag's writer and reader.
struct NetworkFlags {
    static constexpr size_t kLine = 128;  // bytes of a flag in the heap

    size_t first;  // offset of the first in the heap
    int sets;
    int writers;
    int sets_of_all;  // on a channel after all others
    int channels;
    bool by_pair = false;

    // The channel of two ranks, in both directions.
    static EP_HD int channel_of_pair(int one, int other, int channels) {
        return (one + other) % channels;
    }

    EP_HD size_t count() const { return static_cast<size_t>(sets) * writers; }
    EP_HD size_t number(size_t flag) const { return (flag - first) / kLine; }
    // of the flag with this number in the heap of `rank`
    EP_HD int writer(size_t number) const { return static_cast<int>(number % writers); }
    EP_HD int channel(size_t number, int rank) const {
        const int set = static_cast<int>(number / writers);
        if (set < sets_of_all) return channels;
        return by_pair ? channel_of_pair(writer(number), rank, channels)
                       : (set - sets_of_all) % channels;
    }
};

}  // namespace ep
