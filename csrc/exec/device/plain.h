#pragma once

#include <cstddef>
#include <cstdint>

#include "core/lines.h"
#include "exec/device/bulk.h"
#include "exec/device/lines.h"
#include "exec/device/quantize.h"
#include "exec/device/rows.h"
#include "exec/device/sums.h"

namespace ep {

// Does what BulkCopier does with the warp's own loads and stores, to the same bits: for GPUs
// without a copy engine. Nothing is in flight when a call returns, and it takes no shared memory.
class PlainCopier {
  public:
    static constexpr size_t kMinBytes = BulkCopier::kMinBytes;

    EP_FN explicit PlainCopier(BulkBuffers&) {}

    template <CacheHint hint>
    EP_FN void stage(const void*, size_t) {}

    template <CacheHint hint>
    EP_FN void multicast(void* own_dst, uint32_t mask, const void* src, size_t bytes) {
        rows::multicast_vectors<hint>(own_dst, mask, src, bytes);
    }

    EP_FN void quantize(void* own_dst, uint32_t mask, const void* src, uint32_t count,
                        uint32_t scales_at, ScaleFormat format) {
        rows::quantize_elements(own_dst, mask, src, count, scales_at, format);
    }

    template <CacheHint hint>
    EP_FN void copy_each(void* own_dst, const void* own_src, uint32_t mask, uint32_t bytes) {
        for_each_lane(mask, [&](int lane) {
            rows::copy_in_units(rows::shuffle_pointer(own_dst, lane),
                                rows::shuffle_pointer(own_src, lane), bytes);
        });
    }

    EP_FN void drop() {}

    template <class T, CacheHint hint, class Weight>
    EP_FN void sum(void* dst, const void* own_src, Weight own_weight, uint32_t mask,
                   uint32_t bytes) {
        rows::sum_vectors<T>(dst, own_src, own_weight, mask, bytes / sizeof(uint4));
    }

    template <class T, class Weight>
    EP_FN void send_sum(char* slot, const char* own_src, Weight own_weight, uint32_t mask,
                        uint32_t bytes, const Lines& lines, uint64_t tag) {
        rows::send_sum<T>(slot, own_src, own_weight, mask, bytes, lines, tag);
    }

    EP_FN void wait_written() {}
};

}  // namespace ep
