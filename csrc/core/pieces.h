#pragma once

#include <cstddef>
#include <cstdint>

#include "core/float8.h"
#include "core/function.h"
#include "core/row.h"

namespace ep {

// A row's columns are cut into pieces, each with its own tag, so that several warps share a row and
// each piece is received as soon as it arrives. How a row is cut depends only on its shape, because
// both ends must agree. How many neighbouring pieces a warp takes at once may differ.
struct Piece {
    static constexpr int kMax = 4;
    static constexpr int kAlignment = 512;  // bytes: four scales of fp8, which may be one word

    int number, count;             // the first of them, and how many
    int first, bytes;              // of the payload
    int first_scale, scale_bytes;  // of the scales

    EP_HD static size_t tag(int piece) { return piece * sizeof(uint64_t); }

    // The i-th of n parts of a piece: payload only, without a tag.
    EP_HD Piece part(int i, int n) const {
        const int size = static_cast<int>(align_up((bytes + n - 1) / n, kAlignment / 4));
        const int from = i * size < bytes ? i * size : bytes;
        return {number, count, first + from, size < bytes - from ? size : bytes - from, 0, 0};
    }
};

struct Pieces {
    const RowFormat& format;
    int bytes, count;
    int at_once = 1;  // pieces per warp and share

    // All pieces of a row at once.
    EP_HD explicit Pieces(const RowFormat& row)
        : format(row),
          bytes(static_cast<int>(
              align_up((row.payload_bytes + Piece::kMax - 1) / Piece::kMax, Piece::kAlignment))),
          count(row.payload_bytes > bytes ? (row.payload_bytes + bytes - 1) / bytes : 1),
          at_once(count) {}
    // As few at once as give each warp at most one share, if there are enough warps.
    EP_HD Pieces(const RowFormat& row, int rows, int warps) : Pieces(row) {
        for (at_once = 1; at_once < count && rows * shares() > warps;) at_once *= 2;
    }

    // Shares of one row.
    EP_HD int shares() const { return (count + at_once - 1) / at_once; }
    EP_HD Piece operator[](int share) const {
        const int from = share * at_once;
        return part(from, from + at_once < count ? from + at_once : count);
    }
    EP_HD Piece all() const { return part(0, count); }

  private:
    EP_HD Piece part(int from, int to) const {
        auto bytes_before = [&](int piece) {
            return piece < count ? piece * bytes : format.payload_bytes;
        };
        auto scales_before = [&](int piece) {
            const int blocks = scale_blocks(format.payload_bytes);
            return piece < count && blocks
                       ? piece * (bytes / kScaleBlock) * (format.scale_bytes / blocks)
                       : format.scale_bytes;
        };
        return {from,
                to - from,
                bytes_before(from),
                bytes_before(to) - bytes_before(from),
                scales_before(from),
                scales_before(to) - scales_before(from)};
    }
};

}  // namespace ep
