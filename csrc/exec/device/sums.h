#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtypes.h"
#include "exec/device/bulk.h"
#include "exec/device/ptx.h"
#include "exec/device/rows.h"

// Sums of rows, in the order of their lanes, in fp32 (fp64 for fp64). They start from -0, to which adding anything, -0 too, gives exactly that.
namespace ep::rows {

__device__ __forceinline__ float widen(BFloat16 value) {
    return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ __forceinline__ float widen(Float16 value) { return ptx::widen_fp16(value.bits); }
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }

__device__ __forceinline__ void narrow(float value, BFloat16& out) {
    out.bits = static_cast<uint16_t>(ptx::pack_bf16(value, 0));
}
__device__ __forceinline__ void narrow(float value, Float16& out) {
    out.bits = static_cast<uint16_t>(ptx::pack_fp16(value, 0));
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }

// The 16 bytes of a vector as numbers.
template <class T>
struct Elements {
    static constexpr int kCount = sizeof(uint4) / sizeof(T);
    T values[kCount];
};

template <class T>
__device__ __forceinline__ uint4 narrow_vector(const decltype(widen(T{}))* sums) {
    Elements<T> elements;
    uint4 vector;
    static_assert(sizeof(elements) == sizeof(vector));
    if constexpr (sizeof(T) == 2) {  // two at a time
        auto pack = [&](int i) {
            if constexpr (__is_same(T, BFloat16)) return ptx::pack_bf16(sums[i], sums[i + 1]);
            return ptx::pack_fp16(sums[i], sums[i + 1]);
        };
        vector = {pack(0), pack(2), pack(4), pack(6)};
    } else {
#pragma unroll
        for (int i = 0; i < Elements<T>::kCount; ++i) narrow(sums[i], elements.values[i]);
        memcpy(&vector, &elements, sizeof(vector));
    }
    return vector;
}

template <class T>
__device__ __forceinline__ void accumulate(decltype(widen(T{}))* sums, const uint4& vector) {
    Elements<T> elements;
    memcpy(&elements, &vector, sizeof(vector));
#pragma unroll
    for (int i = 0; i < Elements<T>::kCount; ++i) sums[i] += widen(elements.values[i]);
}

// Rows are fetched through shared memory, many vectors ahead of the sums. A lane fetches what it will add itself, so lanes do not wait for
// each other. A stage holds `columns` vectors of each row for each lane.
struct SumStages {
    static constexpr uint32_t kVectors = sizeof(BulkBuffers::data) / (32 * sizeof(uint4));  // of a lane
    static constexpr uint32_t kFewStages = 4;
    static constexpr uint32_t kMostRows = kVectors;

    uint32_t rows;
    uint32_t columns;
    uint32_t stages;

    __device__ __forceinline__ explicit SumStages(uint32_t rows)
        : rows(rows),
          columns(rows < kVectors / kFewStages ? kVectors / kFewStages / rows : 1),
          stages(kVectors / (rows * columns)) {}
};

// Until at most `pending` of this lane's groups of copies are under way; or fewer, beyond kMost.
template <int kMost>
__device__ __forceinline__ void wait_copies(uint32_t pending) {
    if constexpr (kMost > 0) {
        if (pending < kMost) return wait_copies<kMost - 1>(pending);
    }
    ptx::copy_async_wait<kMost>();
}

// Every row and dst aligned to 16 bytes; at most SumStages::kMostRows rows.
template <class T, Reuse reuse>
__device__ __forceinline__ void sum_vectors(char* buffers, void* dst, const void* own_src, uint32_t mask,
                                            uint32_t vectors) {
    using Sum = decltype(widen(T{}));
    const SumStages plan(__popc(mask));
    auto staged = [&](uint32_t stage, uint32_t row, uint32_t column) {
        const uint32_t vector = (stage * plan.rows + row) * plan.columns + column;
        return buffers + (vector * 32 + lane_id()) * sizeof(uint4);
    };
    uint32_t fetched = lane_id();
    auto fetch = [&](uint32_t stage) {
        uint32_t row = 0;
        for_each_lane(mask, [&](int lane) {
            const uint4* in = static_cast<const uint4*>(shuffle_pointer(own_src, lane));
            for (uint32_t column = 0; column < plan.columns; ++column) {
                const uint32_t vector = fetched + 32 * column;
                if (vector < vectors) ptx::copy_async<reuse == Reuse::Late>(staged(stage, row, column), in + vector);
            }
            ++row;
        });
        ptx::copy_async_commit();
        fetched += 32 * plan.columns;
    };
    for (uint32_t stage = 0; stage + 1 < plan.stages; ++stage) fetch(stage);
    uint32_t stage = 0, free_stage = plan.stages - 1;
    for (uint32_t first = lane_id(); first - lane_id() < vectors; first += 32 * plan.columns) {
        fetch(free_stage);
        wait_copies<SumStages::kVectors / SumStages::kFewStages - 1>(plan.stages - 1);
        for (uint32_t column = 0; column < plan.columns && first + 32 * column < vectors; ++column) {
            Sum sums[Elements<T>::kCount];
#pragma unroll
            for (Sum& sum : sums) sum = -Sum{0};
#pragma unroll 4
            for (uint32_t row = 0; row < plan.rows; ++row)
                accumulate<T>(sums, ptx::load_shared(staged(stage, row, column)));
            ptx::store(static_cast<uint4*>(dst) + first + 32 * column, narrow_vector<T>(sums));
        }
        free_stage = stage;
        stage = stage + 1 == plan.stages ? 0 : stage + 1;
    }
}

// The same order of additions, an element at a time.
template <class T>
__device__ __noinline__ inline void sum_elements(void* dst, const void* own_src, uint32_t mask, size_t count) {
    T* out = static_cast<T*>(dst);
    for (size_t first = 0; first < count; first += 32) {
        const size_t i = first + lane_id();
        auto sum = -decltype(widen(T{})){0};
        for_each_lane(mask, [&](int lane) {
            const T* in = static_cast<const T*>(shuffle_pointer(own_src, lane));
            if (i < count) sum += widen(in[i]);
        });
        if (i < count) narrow(sum, out[i]);
    }
}

}  // namespace ep::rows
