// The format of a row in a ring slot, and integer helpers for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/function.h"

namespace ep {

constexpr int kMaxTopk = 32;  // one lane per (token, k)

// dividend / divisor, in 32 bits if they suffice: a 64-bit division is slow on a GPU.
EP_HD uint64_t quotient(uint64_t dividend, uint64_t divisor) {
    if ((dividend | divisor) >> 32) return dividend / divisor;
    return static_cast<uint32_t>(dividend) / static_cast<uint32_t>(divisor);
}

// Whether `id` is one of `count` experts from `first` on.
EP_HD bool is_within(int32_t id, int first, int count) {
    return static_cast<uint32_t>(id) - static_cast<uint32_t>(first) < static_cast<uint32_t>(count);
}

EP_HD size_t align_up(size_t bytes, size_t alignment) {
    return quotient(bytes + alignment - 1, alignment) * alignment;
}

EP_HD uint64_t floor_power_of_two(uint64_t value) {
    uint64_t power = value ? 1 : 0;
    while (power * 2 <= value && power) power *= 2;
    return power;
}

// A row on the wire, in a ring slot:  tag, token | experts[K] | index[K] | weights[K] | payload |
// scales, each part aligned to 16 bytes, the payload of a long row to 128: memory and NVLink move
// lines of that size.
//   tag      which call the row belongs to, and of what shape and type: see row_tag
//   token    its number on its source rank                                 dispatch only
//   experts  the token's expert ids (-1: none)                           dispatch only
//   index    how many earlier rows of the source rank went to that expert   dispatch only
//   weights  the token's weights (dispatch) or their gradients (combine): words of weight_bytes
// Dispatch and combine of the same payload use the same slot size, so that they can follow each
// other in one ring.
struct RowFormat {
    static constexpr int kLongRow = 1024;  // bytes

    // Tag and token in one 16-byte word: every role that moves a row reads or writes both.
    struct alignas(16) Stamp {
        uint64_t tag, token;
    };

    int payload_bytes;
    int scale_bytes;
    int weight_bytes;  // 0, 4 or 8
    int topk;
    int payload_type;  // number of the element type, on which ranks must agree

    RowFormat() = default;
    RowFormat(int payload, int scale, int weight, int k, int type = 0)
        : payload_bytes(payload),
          scale_bytes(scale),
          weight_bytes(weight),
          topk(k),
          payload_type(type) {
        const size_t alignment = payload_bytes < kLongRow ? 16 : 128;
        index_ = experts() + align_up(topk * sizeof(int32_t), 16);
        weights_ = index_ + align_up(topk * sizeof(int32_t), 16);
        payload_ = align_up(weights_ + topk * sizeof(uint64_t), alignment);
        scales_ = payload_ + align_up(payload_bytes, 16);
        slot_bytes_ = align_up(scales_ + scale_bytes, alignment);
    }

    // The tag comes first, so that even a rank that expects another row size finds it.
    EP_HD size_t tag() const { return 0; }
    EP_HD size_t experts() const { return sizeof(Stamp); }
    EP_HD size_t index() const { return index_; }
    EP_HD size_t weights() const { return weights_; }
    EP_HD size_t payload() const { return payload_; }
    EP_HD size_t scales() const { return scales_; }
    EP_HD size_t slot_bytes() const { return slot_bytes_; }
    // Slots in a ring of this size.
    EP_HD uint64_t slots(size_t ring_bytes) const {
        return floor_power_of_two(quotient(ring_bytes, slot_bytes_));
    }

  private:
    // Precomputed because kernels need them for every row.
    size_t index_, weights_, payload_, scales_, slot_bytes_;
};

}  // namespace ep
