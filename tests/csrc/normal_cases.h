#pragma once

#include "simt.h"
// after it
#include "launch/cuda/fused_dispatch.h"
#include "ranks.h"
#include "summed_types.h"

// Random calls of the normal mode, and the memory of all of their ranks on one machine. Between the
// ranks lies the p2p fabric, or with OVER_NCCL or OVER_NVSHMEM that of NCCL or NVSHMEM.
namespace ep {

constexpr int kMaxRanks = 9;
using Notify = NotifyParams<Ranks::Params, kMaxRanks>;
using Dispatch = DispatchParams<Ranks::Params, kMaxRanks>;
using FusedDispatch = FusedDispatchParams<Ranks::Params, kMaxRanks>;
using Combine = CombineParams<Ranks::Params, kMaxRanks>;

// Memory that nothing may write outside of, aligned as the GPU's allocator does.
class Memory {
  public:
    explicit Memory(size_t bytes, char fill = 0, const char* name = "a tensor")
        : bytes_(bytes),
          data_(static_cast<char*>(std::aligned_alloc(256, align_up(bytes + 2 * kGuard, 256)))) {
        std::memset(data_, kMark, bytes_ + 2 * kGuard);
        std::memset(data(), fill, bytes_);
        simt::order::track(data(), bytes_, name);
    }
    Memory(Memory&& other) noexcept
        : bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
    ~Memory() {
        if (!data_) return;
        for (size_t i = 0; i < kGuard; ++i) {
            if (data_[i] != kMark || data()[bytes_ + i] != kMark)
                simt::die("a write outside of its memory");
        }
        simt::order::forget(data());
        std::free(data_);
    }
    char* data() const { return data_ + kGuard; }
    size_t bytes() const { return bytes_; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data());
    }

  private:
    static constexpr size_t kGuard = 256;
    static constexpr char kMark = 0x5a;
    size_t bytes_;
    char* data_;
};

struct Case {
    std::mt19937_64 random;
    Topology topology;
    Heap heap;
    RowFormat format;
    DType dtype;
    int index_bytes, alignment, capacity, nvl_batch, rdma_chunk, peer_warps, rdma_warps, receivers;
    bool fixed_rows, flat;
    std::vector<int> tokens;

    int pick(int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); }

    explicit Case(uint64_t seed) : random(seed) {
        topology = {pick(1, 3), pick(1, 3)};
        const int local_experts = pick(1, 4);
        const int experts = local_experts * topology.world();
        const int topk = pick(1, std::min(6, experts));
        dtype = summed_type(pick(0, 3));
        const int hidden = std::vector<int>{8, 33, 64, 1, 520, 3584, 4100}[pick(0, 6)];
        const int payload = hidden * size_of(dtype);
        format = {payload, pick(0, 2) ? 0 : pick(1, 1200), 4 * pick(0, 2), topk};
        const size_t slot = format.slot_bytes();
        heap = {topology, experts, pick(1, 3), align_up(slot * pick(1, 9), Heap::kLine),
                align_up(slot * pick(1, 5), Heap::kLine)};
        index_bytes = 4 * pick(1, 2);
        alignment = pick(0, 1) ? 1 : 4;
        capacity = pick(0, 3) ? 0 : pick(1, 9);
        if (capacity) alignment = 1;
        fixed_rows = pick(0, 3) == 0;
        flat = seed % 4 == 2;
        if (flat) capacity = 0;
        nvl_batch = pick(1, 8);
        const int slots = static_cast<int>(floor_power_of_two(heap.rdma_ring_bytes / slot));
        rdma_chunk = std::max(1, std::min(pick(1, 8), slots / 2));
        peer_warps = even_warps(topology.world() - 1, pick(1, topology.world()));
        rdma_warps = even_warps(topology.nodes - 1, pick(1, topology.nodes));
        for (int rank = 0; rank < topology.world(); ++rank)
            tokens.push_back(pick(0, 3) ? pick(0, 14) : pick(0, 1));
        receivers = pick(1, std::min<int>(format.slots(heap.nvl_ring_bytes), 6));
    }
};

// One rank's tensors for one side, host or GPU.
struct Tensors {
    Memory dst_rows, rail, out, out_scales, out_weights, y, y_weights, sums, source_tokens;
};

// Of a rank that has so many tokens, and gets and passes on so many; rows: in its output.
inline Tensors tensors_of(const Case& c, size_t tokens, size_t rows, size_t received, size_t rail) {
    const size_t topk = c.format.topk, bytes = c.format.payload_bytes;
    return {Memory(received * topk * sizeof(int32_t), 0x22),
            Memory(rail * topk * sizeof(int32_t), 0x22),
            Memory(rows * bytes, 0x33),
            Memory(rows * c.format.scale_bytes, 0x33),
            Memory(rows * (c.flat ? topk : 1) * c.format.weight_bytes, 0x33),
            Memory(tokens * bytes, 0x44),
            Memory(tokens * topk * c.format.weight_bytes, 0x44),
            Memory((received + 1) * bytes, 0x22),
            Memory(received * sizeof(int32_t), 0x22)};
}

struct Side {
    std::vector<Memory> heaps;
    std::vector<Memory> layouts, counts;
    std::vector<Tensors> tensors;
};

struct Inputs {
    Memory ids, x, scales, weights;
};

// With all the bits that a row's weight can have if the divisor is odd, so that products are
// rounded.
inline void fill(std::mt19937_64& random, const Memory& memory, DType dtype, int divisor = 512) {
    for (size_t i = 0; i < memory.bytes() / size_of(dtype); ++i) {
        const auto number = static_cast<double>(static_cast<int64_t>(random() % 20001) - 10000);
        as_stored(dtype, number / divisor, [&](auto stored) {
            std::memcpy(memory.data() + i * sizeof(stored), &stored, sizeof(stored));
        });
    }
}

inline Inputs make_inputs(Case& c, int tokens) {
    const size_t rows = static_cast<size_t>(tokens);
    Inputs in{Memory(rows * c.format.topk * c.index_bytes), Memory(rows * c.format.payload_bytes),
              Memory(rows * c.format.scale_bytes),
              Memory(rows * c.format.topk * c.format.weight_bytes)};
    for (int token = 0; token < tokens; ++token) {
        std::vector<int> experts(c.heap.num_experts);
        for (int e = 0; e < c.heap.num_experts; ++e) experts[e] = e;
        std::shuffle(experts.begin(), experts.end(), c.random);
        for (int k = 0; k < c.format.topk; ++k) {
            const bool repeats = c.flat && c.pick(0, 3) == 0;
            const int64_t id = c.pick(0, 4) ? experts[repeats ? 0 : k] : -1;
            const size_t i = static_cast<size_t>(token) * c.format.topk + k;
            if (c.index_bytes == 8) {
                in.ids.as<int64_t>()[i] = id;
            } else {
                in.ids.as<int32_t>()[i] = static_cast<int32_t>(id);
            }
        }
    }
    fill(c.random, in.x, c.dtype);
    for (const Memory* memory : {&in.scales, &in.weights}) {
        for (size_t i = 0; i < memory->bytes(); ++i)
            memory->data()[i] = static_cast<char>(c.random());
    }
    return in;
}

inline std::vector<NotifyArgs> notify_args(const Case& c, const std::vector<Inputs>& inputs,
                                           const std::vector<Layout>& layouts, uint64_t epoch,
                                           Side& side) {
    std::vector<NotifyArgs> args;
    side.counts.clear();
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
        side.counts.emplace_back(2 * c.heap.local_experts() * sizeof(int64_t), 0x66);
        args.push_back({{inputs[rank].ids.data(), c.index_bytes, c.alignment, c.capacity,
                         side.counts.back().as<int64_t>(), c.flat},
                        static_cast<int>(rank),
                        c.heap,
                        layouts[rank],
                        epoch});
    }
    return args;
}

inline TransferArgs transfer_args(const Case& c, int rank, const Layout& layout, const Tensors& t,
                                  int64_t rows, uint64_t call) {
    TransferArgs args = {rank,
                         c.heap,
                         layout,
                         c.format,
                         call,
                         c.nvl_batch,
                         c.rdma_chunk,
                         t.dst_rows.as<int32_t>(),
                         t.rail.as<int32_t>(),
                         static_cast<int64_t>(t.dst_rows.bytes() / sizeof(int32_t)) / c.format.topk,
                         static_cast<int64_t>(t.rail.bytes() / sizeof(int32_t)) / c.format.topk,
                         rows};
    args.is_flat = c.flat;
    return args;
}

inline DispatchArgs dispatch_args(const TransferArgs& args, const Inputs& in, const Tensors& t,
                                  bool has_intra_rank_pass = false) {
    return {args,         in.x.data(),         in.scales.data(),     in.weights.data(),
            t.out.data(), t.out_scales.data(), t.out_weights.data(), has_intra_rank_pass};
}

inline DispatchCallArgs fused_args(const DispatchArgs& dispatch, const NotifyArgs& notify) {
    DispatchCallArgs args{dispatch,
                          notify.topk_idx,
                          notify.index_bytes,
                          notify.expert_alignment,
                          notify.expert_capacity,
                          notify.tokens_per_expert,
                          notify.allows_repeats};
    args.fills_tables = true;
    return args;
}

inline std::vector<Layout> layouts_of(const Case& c, Side& side) {
    std::vector<Layout> layouts;
    side.layouts.clear();
    for (const int tokens : c.tokens) {
        Layout layout{c.topology,         tokens,          c.format.topk,
                      c.heap.num_experts, c.heap.channels, nullptr};
        side.layouts.emplace_back(layout.size() * sizeof(int32_t), 0x11, "a layout");
        layout.data = side.layouts.back().as<int32_t>();
        layout.totals() = {};
        simt::order::ignore(&layout.totals().overflow, sizeof(int32_t));
        simt::order::ignore(&layout.totals().bad_token, sizeof(int32_t));
        layouts.push_back(layout);
    }
    return layouts;
}

}  // namespace ep
