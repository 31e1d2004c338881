#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "exec/device/lines.h"
#include "exec/device/ptx.h"
#include "exec/device/quantize.h"
#include "exec/device/rows.h"
#include "exec/device/sums.h"

namespace ep {

// One warp's share of shared memory, through which the SM's copy engine moves rows, one chunk per
// buffer: many bytes are in flight, none of them in registers.
//
// The engine works in the async proxy, which is not ordered with the warp's loads and stores:
//   - a fence separates what this warp has acquired from what the engine reads, which might
//     otherwise be what lay there before;
//   - `wait_written` separates what the engine writes from a flag that promises it, or a reader
//     might find the old bytes;
//   - the engine's writes are issued only after the wait for credit, when the slot's readers are
//     done.
struct BulkBuffers {
    // The buffers of 16 warps fill an SM. Few and large: the engine is slow on small chunks.
    static constexpr uint32_t kChunkBytes = 7168;
    static constexpr int kBuffers = 2;
    alignas(128) char data[kBuffers][kChunkBytes];
    uint64_t filled[kBuffers];
    uint64_t pieces_filled;
    char few_weights[96];  // of few rows that are summed; takes what alignment leaves free
    uint64_t done;  // in the block's first buffers: number of warps that wait for no rank any more

    // Called by one warp, once, before use: its lanes meet before any of them waits at a barrier.
    EP_FN void init() {
        if (rows::lane_id() == 0) {
            for (uint64_t& barrier : filled) ptx::barrier_init(&barrier, 1);
            ptx::barrier_init(&pieces_filled, 1);
            ptx::fence_barrier_init();
        }
    }
};

// Moves rows through BulkBuffers. Addresses and sizes are multiples of 16 bytes.
class BulkCopier {
  public:
    // Below, loads and stores have less to wait for. Not measured: chosen as two vectors per lane.
    static constexpr size_t kMinBytes = 1024;

    EP_FN explicit BulkCopier(BulkBuffers& buffers) : buffers_(buffers) {}

    // Begins to read the row that the next multicast writes.
    template <CacheHint hint>
    EP_FN void stage(const void* src, size_t bytes) {
        ptx::fence_proxy_async_global();
        in_ = static_cast<const char*>(src);
        left_ = bytes;
        stage_chunks<hint, BulkBuffers::kBuffers - 1>();
    }

    // Copies a row, read once, to the destination of each lane in the mask. Returns when it is
    // read.
    template <CacheHint hint>
    EP_FN void multicast(void* own_dst, uint32_t mask, const void* src, size_t bytes) {
        const bool writes = mask >> rows::lane_id() & 1;
        char* out = static_cast<char*>(own_dst);
        for_each_chunk(src, bytes, [&](char* part, uint32_t done, uint32_t size) {
            if (writes) ptx::bulk_store<hint == CacheHint::EvictFirst>(out + done, part, size);
        });
    }

    // Does the same with bf16 as fp8: the first half of each buffer becomes what is written.
    EP_FN void quantize(void* own_dst, uint32_t mask, const void* src, uint32_t count,
                        uint32_t scales_at, ScaleFormat format) {
        static_assert(BulkBuffers::kChunkBytes % (2 * kScaleBlock) == 0);
        const bool writes = mask >> rows::lane_id() & 1;
        char* out = static_cast<char*>(own_dst);
        for_each_chunk(src, 2 * count, [&](char* part, uint32_t done, uint32_t size) {
            const float scale = rows::quantize_shared(part, size / 2, format);
            // Orders these stores before the engine's reads, which might find older bytes.
            ptx::fence_proxy_async_shared();
            __syncwarp();
            if (writes) ptx::bulk_store<false>(out + done / 2, part, size / 2);
            rows::store_scales(out + scales_at, mask, scale, done / (2 * kScaleBlock),
                               scale_blocks(size / 2), format);
        });
    }

    // Copies a row of each lane in the mask, which was there when the previous launch ended, to
    // that lane's destination. A buffer holds several rows or a part of one, and one buffer is read
    // while the other is written.
    template <CacheHint hint>
    EP_FN void copy_each(void* own_dst, const void* own_src, uint32_t mask, uint32_t bytes) {
        const uint32_t own = lanes_below(mask, rows::lane_id()), count = __popc(mask);
        const bool takes_part = mask >> rows::lane_id() & 1;
        for (uint32_t at = 0; at < bytes; at += BulkBuffers::kChunkBytes) {
            const uint32_t size = chunk(bytes - at), at_once = BulkBuffers::kChunkBytes / size;
            auto is_in = [&](uint32_t first) {
                return takes_part && own >= first && own < first + at_once;
            };
            auto read = [&](uint32_t first) {
                ptx::bulk_wait_read<0>();
                uint64_t* barrier = &buffers_.filled[filled_ % BulkBuffers::kBuffers];
                const uint32_t rows_now = count - first < at_once ? count - first : at_once;
                if (rows::lane_id() == 0) ptx::barrier_arrive_expect(barrier, rows_now * size);
                __syncwarp();  // now no lane's writes read that buffer any more
                if (is_in(first))
                    ptx::bulk_load<hint == CacheHint::EvictFirst>(
                        buffer(filled_) + (own - first) * size,
                        static_cast<const char*>(own_src) + at, size, barrier);
                ++filled_;
            };
            read(0);
            for (uint32_t first = 0; first < count; first += at_once) {
                if (first + at_once < count) read(first + at_once);
                wait_filled();
                if (is_in(first))
                    ptx::bulk_store<false>(static_cast<char*>(own_dst) + at,
                                           buffer(emptied_) + (own - first) * size, size);
                ptx::bulk_commit();
                ++emptied_;
            }
        }
        __syncwarp();
    }

    // Discards what was staged.
    EP_FN void drop() {
        for (; emptied_ != filled_; ++emptied_) {
            wait_filled();
            ptx::bulk_commit();  // one group per chunk, as `fill` counts them
        }
        left_ = 0;
        __syncwarp();
    }

    // Sums the rows of the lanes in the mask, in lane order, a piece of each at a time. The pieces
    // lie side by side in the buffers, as large as they can be: while this warp waits for them the
    // others of its SM add theirs. Weights follow the pieces, in the buffers only if they are many.
    // A shuffle would not do, because lanes beyond a piece's end take no part in its loop.
    template <class T, CacheHint hint, class Weight>
    EP_FN void sum(void* dst, const void* own_src, Weight own_weight, uint32_t mask,
                   uint32_t bytes) {
        constexpr uint32_t kVector = sizeof(uint4);
        static_assert(kMostRows<kVector> >= 32);
        auto add = [&](uint32_t at, uint32_t size, const char* rows, auto weights, uint32_t count,
                       uint32_t stride) {
            constexpr bool kWeighted = !std::is_same_v<Weight, rows::NoWeight>;
            constexpr int kAtOnce = kWeighted ? 1 : Architecture::kVectorsAtOnce;
            constexpr uint32_t kStep = 32 * kVector;
            char* to = static_cast<char*>(dst) + at;
            for (uint32_t i = rows::lane_id() * kVector; i < size; i += kAtOnce * kStep) {
                uint32_t places[kAtOnce];
                uint4 sums[kAtOnce];
#pragma unroll
                for (int v = 0; v < kAtOnce; ++v)
                    places[v] = i + v * kStep < size ? i + v * kStep : i;
                rows::sum_shared<T>(sums, rows, places, weights, count, stride);
#pragma unroll
                for (int v = 0; v < kAtOnce; ++v) {
                    if (i + v * kStep < size)
                        ptx::store(reinterpret_cast<uint4*>(to + places[v]), sums[v]);
                }
            }
        };
        for_each_piece<kVector, hint>(own_src, own_weight, mask, bytes, add);
    }

    // Sums rows, which may lie anywhere, and sends the sum as lines. Few lines, a single row, or
    // more rows than the buffers hold pieces of are summed in registers.
    template <class T, class Weight>
    EP_FN void send_sum(char* slot, const char* own_src, Weight own_weight, uint32_t mask,
                        uint32_t bytes, const Lines& lines, uint64_t tag) {
        constexpr int kFewLines = 16;
        constexpr uint32_t kStep = rows::kLinesAtOnce * Line::kPayload;
        const bool fits = (mask & (mask - 1)) && __popc(mask) <= kMostRows<kStep>;
        const uint32_t before = lines.first * Line::kPayload, end = lines.end() * Line::kPayload;
        const uint32_t here = (end < bytes ? end : bytes) - before;
        const char* own_part = own_src + before;
        if (!fits || lines.count <= kFewLines || rows::misalignment(own_part, mask, nullptr, here))
            return rows::send_sum<T>(slot, own_src, own_weight, mask, bytes, lines, tag);
        auto add = [&](uint32_t at, uint32_t size, const char* rows, auto weights, uint32_t count,
                       uint32_t stride) {
            for (uint32_t i = 0; i < size; i += kStep) {
                uint4 unit[1] = {rows::tag_unit(0, tag)};
                const uint32_t own = i + rows::offset_of_lane(rows::line_of_lane());
                if (!rows::holds_tag()) {
                    unit[0] = {};
                    if (own < size) rows::sum_shared<T>(unit, rows, {own}, weights, count, stride);
                }
                const int first = lines.first + static_cast<int>((at + i) / Line::kPayload);
                rows::store_lines(slot, 1, first, lines.end(), unit);
            }
        };
        for_each_piece<kStep, CacheHint::EvictFirst>(own_part, own_weight, mask, here, add);
    }

    // Called by every lane, whose writes are its own: before any lane releases what was copied, and
    // before the kernel ends.
    EP_FN void wait_written() { ptx::bulk_wait_written(); }

  private:
    static constexpr uint32_t kWeightBytes = 32 * sizeof(double);
    // Most rows of which the buffers hold a piece of kUnit bytes each, without weights.
    template <uint32_t kUnit>
    static constexpr int kMostRows = (sizeof(BulkBuffers::data) - kWeightBytes) / kUnit;

    // Calls add(bytes before, bytes, the rows' pieces, their weights, how many, stride) for a piece
    // of all rows in the mask, at most kMostRows<kUnit>, once it has arrived. Pieces are multiples
    // of kUnit, except for the last.
    template <uint32_t kUnit, CacheHint hint, class Weight, class Add>
    EP_FN void for_each_piece(const void* own_src, Weight own_weight, uint32_t mask, uint32_t bytes,
                              Add&& add) {
        constexpr bool kWeighted = !std::is_same_v<Weight, rows::NoWeight>;
        static_assert(32 * sizeof(Weight) <= kWeightBytes && kWeightBytes % 16 == 0);
        const uint32_t count = __popc(mask);
        const bool many = kWeighted && count * sizeof(Weight) > sizeof(BulkBuffers::few_weights);
        const uint32_t room = sizeof(BulkBuffers::data) - (many ? kWeightBytes : 0);
        const uint32_t piece = room / count / kUnit * kUnit;
        const uint32_t own_row = lanes_below(mask, rows::lane_id());
        const bool takes_part = mask >> rows::lane_id() & 1;
        char* pieces = buffers_.data[0];
        const char* in = static_cast<const char*>(own_src);
        ptx::fence_proxy_async_global();
        ptx::bulk_wait_read<0>();
        __syncwarp();  // now no lane's writes read the buffers any more
        char* last = pieces + sizeof(BulkBuffers::data) - kWeightBytes;
        const auto weights =
            share(own_weight, many ? last : buffers_.few_weights, takes_part, own_row);
        for (uint32_t at = 0; at < bytes; at += piece, ++sums_) {
            const uint32_t size = bytes - at < piece ? bytes - at : piece;
            if (rows::lane_id() == 0)
                ptx::barrier_arrive_expect(&buffers_.pieces_filled, count * size);
            __syncwarp();  // the pieces before these have been added by all lanes, too
            if (takes_part)
                ptx::bulk_load<hint == CacheHint::EvictFirst>(pieces + own_row * piece, in + at,
                                                              size, &buffers_.pieces_filled);
            while (!ptx::barrier_try_wait(&buffers_.pieces_filled, sums_ & 1)) {
            }
            add(at, size, pieces, weights, count, piece);
        }
        __syncwarp();
    }

    // Stores rows' weights side by side, in lane order. They are visible once the lanes have met.
    EP_FN rows::NoWeights share(rows::NoWeight, char*, bool, uint32_t) { return {}; }
    template <class Weight>
    EP_FN rows::SharedWeights<Weight> share(Weight own, char* place, bool takes_part,
                                            uint32_t own_row) {
        auto* first = reinterpret_cast<Weight*>(place);
        if (takes_part) ptx::store_shared(first + own_row, own);
        // Orders these stores before a later copy of rows to the same place, or the copy might come
        // first and the weights lie in the row.
        ptx::fence_proxy_async_shared();
        return {first};
    }

    // Calls f(buffer, bytes before it, bytes in it) for each chunk of a row, once it has arrived.
    template <class F>
    EP_FN void for_each_chunk(const void* src, size_t bytes, F&& f) {
        if (filled_ == emptied_) stage<CacheHint::Keep>(src, bytes);
        for (size_t done = 0; done < bytes; done += BulkBuffers::kChunkBytes) {
            wait_filled();
            f(buffer(emptied_), done, chunk(bytes - done));
            ptx::bulk_commit();
            ++emptied_;
            // refill the buffer before this one, whose writes are older
            if (left_ && filled_ - emptied_ < BulkBuffers::kBuffers - 1) fill<CacheHint::Keep, 1>();
        }
        __syncwarp();
    }

    static EP_FN uint32_t chunk(size_t rest) {
        return rest < BulkBuffers::kChunkBytes ? rest : BulkBuffers::kChunkBytes;
    }

    EP_FN char* buffer(uint32_t number) const {
        return buffers_.data[number % BulkBuffers::kBuffers];
    }

    EP_FN void wait_filled() {
        while (!ptx::barrier_try_wait(&buffers_.filled[emptied_ % BulkBuffers::kBuffers],
                                      emptied_ / BulkBuffers::kBuffers & 1)) {
        }
    }

    // Fills the oldest buffer first: its writes are done when the kYounger others may still read.
    template <CacheHint hint, int kYounger>
    EP_FN void stage_chunks() {
        if (!left_) return;
        fill<hint, kYounger>();
        if constexpr (kYounger > 0) stage_chunks<hint, kYounger - 1>();
    }

    // Starts to read the next chunk, once all but kPending newer writes have read their buffers.
    template <CacheHint hint, int kPending>
    EP_FN void fill() {
        ptx::bulk_wait_read<kPending>();
        __syncwarp();
        const uint32_t size = chunk(left_);
        if (rows::lane_id() == 0) {
            uint64_t* barrier = &buffers_.filled[filled_ % BulkBuffers::kBuffers];
            ptx::barrier_arrive_expect(barrier, size);
            ptx::bulk_load<hint == CacheHint::EvictFirst>(buffer(filled_), in_, size, barrier);
        }
        in_ += size;
        left_ -= size;
        ++filled_;
    }

    BulkBuffers& buffers_;
    const char* in_ = nullptr;  // next part of the staged row
    uint32_t left_ = 0;
    uint32_t filled_ = 0;  // chunks over the warp's life: buffer number, parity of its barrier
    uint32_t emptied_ = 0;
    uint32_t sums_ = 0;  // pieces of sums, for the parity of their barrier
};

}  // namespace ep
