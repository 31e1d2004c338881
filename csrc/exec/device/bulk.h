#pragma once

#include <cstddef>
#include <cstdint>

#include "exec/device/ptx.h"
#include "exec/device/rows.h"

namespace ep {

// One warp's share of shared memory, through which the SM's copy engine moves rows: a row is read once and written to each destination, and the
// warp's registers see none of it. Two buffers, so that a chunk is read while the one before is written.
//
// The engine works in the async proxy: a fence stands between what this warp has acquired and the engine's reads and writes, and
// `wait_written` between the engine's writes and a flag that promises them.
struct BulkBuffers {
    static constexpr uint32_t kChunkBytes = 8192;
    static constexpr int kBuffers = 2;
    alignas(128) char data[kBuffers][kChunkBytes];
    uint64_t filled[kBuffers];

    // By one warp, once, before use.
    __device__ __forceinline__ void init() {
        if (rows::lane_id() == 0) {
            for (uint64_t& barrier : filled) ptx::barrier_init(&barrier, 1);
            ptx::fence_barrier_init();
        }
        __syncwarp();
    }
};

class BulkCopier {
  public:
    static constexpr size_t kLeastBytes = 1024;  // below, loads and stores have less to wait for

    __device__ __forceinline__ explicit BulkCopier(BulkBuffers& buffers) : buffers_(buffers) {}

    // Each lane's own destination in the mask gets the row. Everything aligned to 16 bytes. Returns when the source has been read.
    __device__ __forceinline__ void multicast(void* own_dst, uint32_t mask, const void* src, size_t bytes) {
        const bool writes = mask >> rows::lane_id() & 1;
        const char* in = static_cast<const char*>(src);
        char* out = static_cast<char*>(own_dst);
        ptx::fence_proxy_async_global();
        fill(in, bytes);
        for (size_t done = 0; done < bytes; done += BulkBuffers::kChunkBytes) {
            const size_t next = done + BulkBuffers::kChunkBytes;
            if (next < bytes) fill(in + next, bytes - next);
            const int buffer = emptied_ % BulkBuffers::kBuffers;
            while (!ptx::barrier_try_wait(&buffers_.filled[buffer], emptied_ / BulkBuffers::kBuffers & 1)) {
            }
            ++emptied_;
            if (writes) ptx::bulk_store(out + done, buffers_.data[buffer], chunk(bytes - done));
            ptx::bulk_commit();
        }
        __syncwarp();
    }

    // Every lane, before another lane may release what was copied, and before the kernel ends.
    __device__ __forceinline__ void wait_written() { ptx::bulk_wait_written(); }

  private:
    static __device__ __forceinline__ uint32_t chunk(size_t rest) {
        return rest < BulkBuffers::kChunkBytes ? rest : BulkBuffers::kChunkBytes;
    }

    // Starts to read the next chunk, once the writes out of its buffer have read it.
    __device__ __forceinline__ void fill(const char* in, size_t rest) {
        ptx::bulk_wait_read<0>();
        __syncwarp();
        if (rows::lane_id() == 0) {
            const int buffer = filled_ % BulkBuffers::kBuffers;
            ptx::barrier_arrive_expect(&buffers_.filled[buffer], chunk(rest));
            ptx::bulk_load(buffers_.data[buffer], in, chunk(rest), &buffers_.filled[buffer]);
        }
        ++filled_;
    }

    BulkBuffers& buffers_;
    uint32_t filled_ = 0;  // chunks over the life of the warp: they number the buffers and give the barriers' parity
    uint32_t emptied_ = 0;
};

}  // namespace ep
