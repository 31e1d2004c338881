// Lines (core/lines.h) of a row, written and read on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/lines.h"

namespace ep {

template <class Char>
Char* line_of(Char* slot, int line) {
    return slot + static_cast<size_t>(line) * Line::kBytes;
}
inline uint64_t* line_tag(char* slot, int line) {
    return reinterpret_cast<uint64_t*>(line_of(slot, line) + Line::kTag);
}

// Where the payload of a line lies in a row.
inline const char* payload_in(const char* row, int line) {
    return row + static_cast<size_t>(line) * Line::kPayload;
}
// Bytes of a row's payload in a line.
inline size_t payload_of(size_t bytes, int line) {
    return std::min<size_t>(Line::kPayload, bytes - static_cast<size_t>(line) * Line::kPayload);
}

// Writes a line without its tag. src, scales: of the whole row.
inline void write_line(char* slot, int line, const char* src, size_t bytes, const char* scales,
                       const ScalePlan& plan) {
    char* to = line_of(slot, line);
    std::memcpy(to, src + static_cast<size_t>(line) * Line::kPayload, payload_of(bytes, line));
    const int block = Line::scale(line, plan.blocks);
    if (block >= 0)
        std::memcpy(to + Line::kBeside, scales + static_cast<size_t>(block) * plan.bytes,
                    plan.bytes);
}

inline void read_line(const char* from, int line, char* row, size_t bytes, char* scales,
                      const ScalePlan& plan) {
    std::memcpy(row + static_cast<size_t>(line) * Line::kPayload, from, payload_of(bytes, line));
    const int block = Line::scale(line, plan.blocks);
    if (block >= 0) std::memcpy(scales + plan.offset(block), from + Line::kBeside, plan.bytes);
}

}  // namespace ep
