#pragma once

#include <cstddef>
#include <cstdint>

#include "core/lines.h"
#include "exec/device/architecture.h"
#include "exec/device/ptx.h"
#include "exec/device/quantize.h"
#include "exec/device/rows.h"
#include "exec/device/sums.h"

// Lines: eight neighbouring lanes store or load a line by one instruction, so that it is whole. All
// 32 lanes call each function; pointers and sizes are the same in all lanes unless named own_*.
namespace ep::rows {

// A group: the lines that one instruction loads or stores.
constexpr int kLinesAtOnce = 32 / Line::kUnits, kGroupBytes = kLinesAtOnce * Line::kBytes;

// The lane's line of a group, and its unit of that line.
EP_FN int line_of_lane() { return lane_id() / Line::kUnits; }
EP_FN int unit_of_lane() { return lane_id() % Line::kUnits; }
// The lane's unit of the group that begins with first_line.
template <class T>
EP_FN T* own_unit(T* slot, int first_line) {
    return slot + static_cast<size_t>(first_line) * Line::kBytes + lane_id() * Line::kUnit;
}
EP_FN bool holds_tag() { return unit_of_lane() == Line::kUnits - 1; }

EP_FN uint4 tag_unit(uint32_t beside, uint64_t tag) {
    return {beside, 0, static_cast<uint32_t>(tag), static_cast<uint32_t>(tag >> 32)};
}
EP_FN uint64_t tag_in(const uint4& unit) { return static_cast<uint64_t>(unit.w) << 32 | unit.z; }

// Called by one lane: loads or stores up to 16 bytes that may lie anywhere; loads zeros after them.
__device__ __noinline__ inline uint4 load_bytes(const char* src, int bytes) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < Line::kUnit; ++i) {
        if (i < bytes)
            words[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(src[i])) << i % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
}
__device__ __noinline__ inline void store_bytes(char* dst, uint4 unit, int bytes) {
    const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < Line::kUnit; ++i) {
        if (i < bytes) dst[i] = static_cast<char>(words[i / 4] >> i % 4 * 8);
    }
}
EP_FN bool is_whole(const char* address, int bytes) {
    return bytes >= Line::kUnit && !(reinterpret_cast<uintptr_t>(address) % Line::kUnit);
}
EP_FN uint4 load_unit(const char* src, int bytes) {
    if (is_whole(src, bytes)) return ptx::load_no_allocate(reinterpret_cast<const uint4*>(src));
    return load_bytes(src, bytes);
}
EP_FN void store_unit(char* dst, const uint4& unit, int bytes) {
    if (is_whole(dst, bytes)) return ptx::store_streaming(reinterpret_cast<uint4*>(dst), unit);
    store_bytes(dst, unit, bytes);
}

// Offset in the row's payload of the lane's unit of a line.
EP_FN uint32_t offset_of_lane(int line) {
    return line * Line::kPayload + unit_of_lane() * Line::kUnit;
}

// Stores lines [first, end), at most kLinesAtOnce * kGroups, to the slot of each lane in the mask.
template <int kGroups>
EP_FN void store_lines(char* own_slot, uint32_t mask, int first, int end,
                       const uint4 (&units)[kGroups]) {
    const int left = end - first - line_of_lane();
    __syncwarp();  // the lanes of a line store together
    for_each_lane(mask, [&](int lane) {
        char* lines = own_unit(shuffle_pointer(own_slot, lane), first);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            if (kLinesAtOnce * group < left)
                ptx::store_line(lines + group * kGroupBytes, units[group]);
        }
    });
}

EP_FN void send_lines(char* own_slot, uint32_t mask, const char* src, uint32_t bytes,
                      const Lines& lines, uint64_t tag, const char* scales, const ScalePlan& plan) {
    constexpr int kGroups = 4;
    for (int first = lines.first; first < lines.end(); first += kLinesAtOnce * kGroups) {
        uint4 units[kGroups];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const int line = first + kLinesAtOnce * group + line_of_lane();
            const uint32_t offset = offset_of_lane(line);
            units[group] = {};
            if (line >= lines.end()) continue;
            if (!holds_tag()) {
                if (offset < bytes) units[group] = load_unit(src + offset, bytes - offset);
                continue;
            }
            const int block = Line::scale(line, plan.blocks);
            const uint32_t beside =
                block < 0 ? 0 : load_bytes(scales + block * plan.bytes, plan.bytes).x;
            units[group] = tag_unit(beside, tag);
        }
        store_lines(own_slot, mask, first, lines.end(), units);
    }
}

// Sends a row of `count` bf16 as fp8, a block of lines at a time: 56 units of 16 values, of which
// each lane makes two, and eight lanes their scale. Shuffles pass them to the storing lanes.
EP_FN void quantize_lines(char* own_slot, uint32_t mask, const char* src, uint32_t count,
                          const Lines& lines, uint64_t tag, ScaleFormat format) {
    constexpr int kHalves = 2, kLanesOfScale = kScaleBlock / Line::kUnit;
    for (int first = lines.first; first < lines.end(); first += Line::kBlock) {
        uint4 made[kHalves];
        uint32_t scales[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const uint32_t element = first * Line::kPayload + (32 * half + lane_id()) * Line::kUnit;
            const int bytes = element < count ? 2 * static_cast<int>(count - element) : 0;
            uint4 low{}, high{};
            if (bytes > 0) low = load_unit(src + 2 * size_t{element}, bytes);
            if (bytes > Line::kUnit)
                high = load_unit(src + 2 * size_t{element} + Line::kUnit, bytes - Line::kUnit);
            auto largest_of = [](const uint4& unit) {
                return max_u16x2(max_u16x2(magnitudes(unit.x), magnitudes(unit.y)),
                                 max_u16x2(magnitudes(unit.z), magnitudes(unit.w)));
            };
            uint32_t largest = max_u16x2(largest_of(low), largest_of(high));
#pragma unroll
            for (int distance = kLanesOfScale / 2; distance; distance /= 2)
                largest = max_u16x2(largest, __shfl_xor_sync(kAllLanes, largest, distance));
            const float scale = scale_of(larger_of(largest), format);
            const Divider divided(scale);
            made[half] = {
                quantize_four(divided, low.x, low.y), quantize_four(divided, low.z, low.w),
                quantize_four(divided, high.x, high.y), quantize_four(divided, high.z, high.w)};
            scales[half] = format == ScaleFormat::Ue8m0 ? ue8m0(scale) : __float_as_uint(scale);
        }
        uint4 units[kHalves];
#pragma unroll
        for (int group = 0; group < kHalves; ++group) {
            const int line = kLinesAtOnce * group + line_of_lane();
            // the tag's lane takes the first unit of its line's scale
            const int unit =
                holds_tag() ? line * kLanesOfScale : line * (Line::kUnits - 1) + unit_of_lane();
            auto take = [&](uint32_t low, uint32_t high) {
                const uint32_t from_low = __shfl_sync(kAllLanes, low, unit % 32);
                const uint32_t from_high = __shfl_sync(kAllLanes, high, unit % 32);
                return unit < 32 ? from_low : from_high;
            };
            units[group] = {take(made[0].x, made[1].x), take(made[0].y, made[1].y),
                            take(made[0].z, made[1].z), take(made[0].w, made[1].w)};
            const uint32_t scale = take(scales[0], scales[1]);
            if (holds_tag()) units[group] = tag_unit(line < Line::kScales ? scale : 0, tag);
        }
        store_lines(own_slot, mask, first, lines.end(), units);
    }
}

// Loads the lane's unit of a line from a row's payload; zeros if it has none.
EP_FN uint4 load_payload(const char* row, uint32_t bytes, int line) {
    const uint32_t offset = offset_of_lane(line);
    if (holds_tag() || offset >= bytes) return {};
    return load_unit(row + offset, bytes - offset);
}

// Groups of lines, and rows, that a lane holds at once while it sums.
constexpr int kSummedGroups = 2, kRowsAtOnce = Architecture::kRowsAtOnce;

// units: receive the lane's units of the sum of the rows in the mask. load(lane, units) begins to
// load those of a lane's row; await(lane, units) waits for them, in the same order; false: it ended
// badly.
template <class T, class Weight, class Load, class Await>
EP_FN bool sum_units(uint4 (&units)[kSummedGroups], Weight own_weight, uint32_t mask, Load&& load,
                     Await&& await) {
    VectorSums<T, kSummedGroups> sums;
    const bool is_copy = std::is_same_v<Weight, NoWeight> && !(mask & (mask - 1));
    for (uint32_t rest = mask; rest;) {
        uint4 rows[kRowsAtOnce][kSummedGroups];
        uint32_t begun = rest;
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
            if (!begun) break;
            load(lowest_lane(begun), rows[row]);
            begun &= begun - 1;
        }
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
            if (!rest) break;
            const int lane = lowest_lane(rest);
            rest &= rest - 1;
            if (!await(lane, rows[row])) return false;
            if (is_copy) {
#pragma unroll
                for (int group = 0; group < kSummedGroups; ++group) units[group] = rows[0][group];
                return true;
            }
            sums.add(rows[row], weight_of(own_weight, lane));
        }
    }
    if (mask) return sums.round(units), true;
#pragma unroll
    for (uint4& unit : units) unit = {};
    return true;
}

template <class T, class Weight>
EP_FN void send_sum(char* slot, const char* own_src, Weight own_weight, uint32_t mask,
                    uint32_t bytes, const Lines& lines, uint64_t tag) {
    for (int first = lines.first; first < lines.end(); first += kLinesAtOnce * kSummedGroups) {
        uint4 units[kSummedGroups];
        sum_units<T>(
            units, own_weight, mask,
            [&](int lane, uint4(&row)[kSummedGroups]) {
                const char* src = shuffle_pointer(own_src, lane);
#pragma unroll
                for (int group = 0; group < kSummedGroups; ++group)
                    row[group] =
                        load_payload(src, bytes, first + kLinesAtOnce * group + line_of_lane());
            },
            [](int, const uint4(&)[kSummedGroups]) { return true; });
        if (holds_tag()) {
#pragma unroll
            for (uint4& unit : units) unit = tag_unit(0, tag);
        }
        store_lines(slot, 1, first, lines.end(), units);
    }
}

// Stores the lanes' loaded units of lines [first, end) to the row of each lane in the mask.
template <int kGroups>
EP_FN void store_payload(char* own_row, uint32_t mask, uint32_t bytes, int first, int end,
                         const uint4 (&units)[kGroups]) {
    if (holds_tag()) end = 0;
    for_each_lane(mask, [&](int lane) {
        char* row = shuffle_pointer(own_row, lane);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const int line = first + kLinesAtOnce * group + line_of_lane();
            const uint32_t offset = offset_of_lane(line);
            if (line < end && offset < bytes)
                store_unit(row + offset, units[group], bytes - offset);
        }
    });
}

// Stores the bits of a scale of `bytes` bytes, aligned to its size.
EP_FN void store_scale_bits(char* dst, uint32_t scale, int bytes) {
    if (bytes == sizeof(uint32_t)) {
        *reinterpret_cast<uint32_t*>(dst) = scale;
    } else {
        *dst = static_cast<char>(scale);
    }
}

// Stores the scales beside these lines likewise.
template <int kGroups>
EP_FN void store_beside(char* own_scales, uint32_t mask, const ScalePlan& plan, int first, int end,
                        const uint4 (&units)[kGroups]) {
    if (!plan.blocks) return;
    if (!holds_tag()) end = 0;
    for_each_lane(mask, [&](int lane) {
        char* scales = shuffle_pointer(own_scales, lane);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const int line = first + kLinesAtOnce * group + line_of_lane();
            const int block = line < end ? Line::scale(line, plan.blocks) : -1;
            if (block >= 0)
                store_scale_bits(scales + plan.offset(block), units[group].x, plan.bytes);
        }
    });
}

}  // namespace ep::rows
