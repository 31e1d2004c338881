#pragma once

#include <cstddef>
#include <cstdint>

#include "core/float8.h"
#include "core/function.h"
#include "core/row.h"

namespace ep {

// A part of a row's columns, which one warp sends and which has a tag of its own, so that several
// warps share a row and each part is received as soon as it is there.
struct Piece {
    static constexpr int kMost = 4;
    static constexpr int kAlignment = 512;  // bytes: of fp8 four scales, which may be one word

    int number;
    int first, bytes;              // of the payload
    int first_scale, scale_bytes;  // of the scales

    EP_HD size_t tag() const { return number * sizeof(uint64_t); }
};

// How a row is cut. Of its shape alone: both ends have to know.
struct Pieces {
    int count, bytes;
    const RowFormat& format;

    EP_HD explicit Pieces(const RowFormat& row)
        : bytes(static_cast<int>(
              align_up((row.payload_bytes + Piece::kMost - 1) / Piece::kMost, Piece::kAlignment))),
          format(row) {
        count = row.payload_bytes > bytes ? (row.payload_bytes + bytes - 1) / bytes : 1;
    }

    EP_HD Piece operator[](int number) const { return part(number, number + 1); }
    // All of them; its tag is the first one's.
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
        return {from, bytes_before(from), bytes_before(to) - bytes_before(from),
                scales_before(from), scales_before(to) - scales_before(from)};
    }
};

}  // namespace ep
