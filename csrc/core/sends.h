#pragma once

#include <cstdint>

#include "core/function.h"
#include "core/row.h"

namespace ep {

// What a rank sends in a call, as one word that others may read at any time. It explains how calls
// differ; that they differ is found by the tags of rows.
struct Sends {
    enum class Kind : int {
        Dispatch,
        Combine,
        WeightedCombine,
        CombineAtExpert,
        FlatDispatch,
        PlannedDispatch,
        PlannedCombine
    };
    enum class Mode : int { Transfer, LowLatencyDispatch, LowLatencyCombine };  // counted apart
    static constexpr int kModes = 3;
    static constexpr uint64_t kKept = 2;  // last calls of each mode
    static constexpr uint64_t kCalls = 1 << 16;

    Kind kind;
    // Per block of 128 elements; 0 for a plan, whose scales belong to the payload.
    uint64_t scale_bytes;
    uint64_t weight_bytes;  // 0, 4 or 8
    uint64_t topk;
    uint64_t payload_type;
    uint64_t payload_bytes;
    uint64_t call;  // modulo kCalls

    static EP_HD uint64_t word(Kind kind, uint64_t call, const RowFormat& format) {
        auto word = static_cast<uint64_t>(kind);
        auto add = [&](uint64_t value, int bits) {
            word = word << bits | (value & ((uint64_t{1} << bits) - 1));
        };
        const bool is_planned = kind == Kind::PlannedDispatch || kind == Kind::PlannedCombine;
        const int scales = is_planned ? 0 : format.scale_bytes;
        add(scales ? scales / ((format.payload_bytes + 127) / 128) : 0, 3);
        add(format.weight_bytes / 4, 2);
        add(format.topk, 6);
        add(format.payload_type, 3);
        add(format.payload_bytes + (is_planned ? format.scale_bytes : 0), 31);
        add(call % kCalls, 16);
        return word;
    }

    static Sends of(uint64_t word) {
        auto take = [&](int bits) {
            const uint64_t value = word & ((uint64_t{1} << bits) - 1);
            word >>= bits;
            return value;
        };
        Sends sends;
        sends.call = take(16);
        sends.payload_bytes = take(31);
        sends.payload_type = take(3);
        sends.topk = take(6);
        sends.weight_bytes = take(2) * 4;
        sends.scale_bytes = take(3);
        sends.kind = static_cast<Kind>(word);
        return sends;
    }
};

}  // namespace ep
