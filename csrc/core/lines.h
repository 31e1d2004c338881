#pragma once

#include <cstddef>
#include <cstdint>

#include "core/float8.h"
#include "core/function.h"
#include "core/row.h"

namespace ep {

// A row as lines of 128 bytes, each with an inline tag as in NCCL's LL128: a line is stored at once
// and arrives whole, so a warp that finds the tag has the rest, and no sender waits for its stores
// to arrive. Only for memory mapped over links that keep lines whole: see docs/memory_model.md.
//
// A line is 8 units of 16 bytes, one per lane: 7 of the row's payload, then one with 8 bytes that
// travel beside the payload, and the tag.
struct Line {
    static constexpr int kBytes = 128, kUnit = 16, kUnits = kBytes / kUnit;
    static constexpr int kPayload = kBytes - kUnit, kBeside = kPayload, kTag = kBeside + 8;
    // Lines that a warp sends or receives together: they hold whole fp8 blocks, and each of the
    // first kScales lines carries one scale.
    static constexpr int kBlock = 8, kScales = kBlock * kPayload / kScaleBlock;
    static_assert(kBlock * kPayload % kScaleBlock == 0 && kScales <= kBlock);

    // Lines of a row; a row without payload has one, for its tag.
    EP_HD static int count(size_t payload_bytes) {
        return payload_bytes ? static_cast<int>((payload_bytes + kPayload - 1) / kPayload) : 1;
    }
    // Index of the fp8 block whose scale a line carries; -1: none.
    EP_HD static int scale(int line, int blocks) {
        const int block = line / kBlock * kScales + line % kBlock;
        return line % kBlock < kScales && block < blocks ? block : -1;
    }
};

struct Lines {
    int first, count;

    EP_HD int end() const { return first + count; }
};

// A tag: a call's number, and below it in kShapeBits what both ends must agree on.
struct LineTag {
    static constexpr int kShapeBits = 24;

    uint64_t value;

    EP_HD uint64_t number() const { return value >> kShapeBits; }
};

// How the lines of rows are divided among warps: as few blocks at once as give each warp at most
// one share, if there are enough warps.
struct LineShares {
    int lines, at_once = Line::kBlock;

    EP_HD LineShares(const RowFormat& format, int rows, int warps)
        : lines(Line::count(format.payload_bytes)) {
        while (at_once < lines && rows * shares() > warps) at_once *= 2;
    }

    // Shares of one row.
    EP_HD int shares() const { return (lines + at_once - 1) / at_once; }
    EP_HD Lines operator[](int share) const {
        const int first = share * at_once;
        return {first, first + at_once < lines ? at_once : lines - first};
    }
};

// Where the scales go that travel with the lines of a row: four bytes of them per word, word_stride
// bytes from one word to the next.
struct ScalePlan {
    int blocks = 0;  // of the row; 0: no scales
    int bytes = 0;   // of a scale: 1 or 4
    size_t word_stride = 0;

    // The scales of a row are contiguous.
    EP_HD static ScalePlan side_by_side(const RowFormat& format) {
        const int blocks = format.scale_bytes ? scale_blocks(format.payload_bytes) : 0;
        return {blocks, blocks ? format.scale_bytes / blocks : 0, 4};
    }
    EP_HD size_t offset(int block) const {
        return bytes == 4 ? block * word_stride : block / 4 * word_stride + block % 4;
    }
};

}  // namespace ep
