#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/dtypes.h"
#include "exec/device/ptx.h"
#include "exec/device/rows.h"

// Sums of rows, in lane order, in fp32 (fp64 for fp64). They start from -0, to which adding
// anything, also -0, gives exactly that. Weight: a lane's Accumulator<T>, or NoWeight.
namespace ep::rows {

EP_FN float widen(BFloat16 value) {
    return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
EP_FN float widen(Float16 value) { return ptx::widen_fp16(value.bits); }
EP_FN float widen(float value) { return value; }
EP_FN double widen(double value) { return value; }

EP_FN void narrow(float value, BFloat16& out) {
    out.bits = static_cast<uint16_t>(ptx::pack_bf16(value, 0));
}
EP_FN void narrow(float value, Float16& out) {
    out.bits = static_cast<uint16_t>(ptx::pack_fp16(value, 0));
}
EP_FN void narrow(float value, float& out) { out = value; }
EP_FN void narrow(double value, double& out) { out = value; }

struct NoWeight {};

template <class V>
EP_FN V times(V value, NoWeight) {
    return value;
}
// Rounded: the compiler never fuses these with an addition.
EP_FN float times(float value, float weight) { return __fmul_rn(value, weight); }
EP_FN double times(double value, double weight) { return __dmul_rn(value, weight); }

EP_FN NoWeight weight_of(NoWeight, int) { return {}; }
template <class Weight>
EP_FN Weight weight_of(Weight own, int lane) {
    return __shfl_sync(kAllLanes, own, lane);
}

// The 16 bytes of a vector as numbers.
template <class T>
struct Elements {
    static constexpr int kCount = sizeof(uint4) / sizeof(T);
    T values[kCount];
};

template <class T>
EP_FN uint4 narrow_vector(const Accumulator<T>* sums) {
    Elements<T> elements;
    uint4 vector;
    static_assert(sizeof(elements) == sizeof(vector));
    if constexpr (sizeof(T) == 2) {  // two at a time
        auto pack = [&](int i) {
            if constexpr (std::is_same_v<T, BFloat16>) return ptx::pack_bf16(sums[i], sums[i + 1]);
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

template <class T, class Weight>
EP_FN void accumulate(Accumulator<T>* sums, const uint4& vector, Weight weight) {
    Elements<T> elements;
    memcpy(&elements, &vector, sizeof(vector));
#pragma unroll
    for (int i = 0; i < Elements<T>::kCount; ++i)
        sums[i] += times(widen(elements.values[i]), weight);
}

// The sums of some vectors of a lane, added row by row.
template <class T, int kVectors>
struct VectorSums {
    Accumulator<T> sums[kVectors][Elements<T>::kCount];

    EP_FN VectorSums() {
#pragma unroll
        for (auto& vector : sums) {
#pragma unroll
            for (Accumulator<T>& sum : vector) sum = -Accumulator<T>{0};
        }
    }
    template <class Weight>
    EP_FN void add(const uint4 (&vectors)[kVectors], Weight weight) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) accumulate<T>(sums[v], vectors[v], weight);
    }
    EP_FN void round(uint4 (&vectors)[kVectors]) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) vectors[v] = narrow_vector<T>(sums[v]);
    }
};

// Sums short rows, a few at a time in registers. Everything is aligned to 16 bytes.
template <class T, class Weight>
EP_FN void sum_vectors(void* dst, const void* own_src, Weight own_weight, uint32_t mask,
                       uint32_t vectors) {
    using Sum = Accumulator<T>;
    constexpr int kInFlight = 4;
    for (uint32_t first = 0; first < vectors; first += 32) {
        const uint32_t i = first + lane_id();
        Sum sums[Elements<T>::kCount];
#pragma unroll
        for (Sum& sum : sums) sum = -Sum{0};
        for (uint32_t rest = mask; rest;) {
            uint4 values[kInFlight];
            uint32_t taken = rest;
#pragma unroll
            for (int r = 0; r < kInFlight; ++r) {
                if (!taken) break;
                const uint4* in =
                    static_cast<const uint4*>(shuffle_pointer(own_src, lowest_lane(taken)));
                taken &= taken - 1;
                if (i < vectors) values[r] = ptx::load_no_allocate(in + i);
            }
#pragma unroll
            for (int r = 0; r < kInFlight; ++r) {
                if (!rest) break;
                const Weight weight = weight_of(own_weight, lowest_lane(rest));
                rest &= rest - 1;
                accumulate<T>(sums, values[r], weight);
            }
        }
        if (i < vectors) ptx::store(static_cast<uint4*>(dst) + i, narrow_vector<T>(sums));
    }
}

struct NoWeights {
    EP_FN NoWeight operator[](uint32_t) const { return {}; }
};
template <class Weight>
struct SharedWeights {
    const Weight* first;
    EP_FN Weight operator[](uint32_t row) const { return ptx::load_shared(first + row); }
};

// Computes some vectors of the sum of `count` rows in shared memory, `stride` bytes apart; their
// weights are contiguous. at: offset of each vector in a row. No vector waits for another.
template <class T, int kVectors, class Weights>
EP_FN void sum_shared(uint4 (&vectors)[kVectors], const char* rows, const uint32_t (&at)[kVectors],
                      Weights weights, uint32_t count, uint32_t stride) {
    VectorSums<T, kVectors> sums;
#pragma unroll 4
    for (uint32_t row = 0; row < count; ++row) {
        uint4 of_row[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            of_row[v] = ptx::load_shared(rows + row * stride + at[v]);
        sums.add(of_row, weights[row]);
    }
    sums.round(vectors);
}

// Sums one element at a time, in the same order of additions.
template <class T, class Weight>
__device__ __noinline__ inline void sum_elements(void* dst, const void* own_src, Weight own_weight,
                                                 uint32_t mask, size_t count) {
    T* out = static_cast<T*>(dst);
    for (size_t first = 0; first < count; first += 32) {
        const size_t i = first + lane_id();
        Accumulator<T> sum = -Accumulator<T>{0};
        for_each_lane(mask, [&](int lane) {
            const T* in = static_cast<const T*>(shuffle_pointer(own_src, lane));
            const Weight weight = weight_of(own_weight, lane);
            if (i < count) sum += times(widen(in[i]), weight);
        });
        if (i < count) narrow(sum, out[i]);
    }
}

}  // namespace ep::rows
