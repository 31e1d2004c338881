// The CUDA kernels, lane by lane on the host (simt/simt.h): for random cases they must give the
// bits that the host gives.
//
//     device_warp FIRST_SEED END_SEED
//     device_warp absent
//     device_warp incident
//     device_warp waits
//     device_warp given_up
//     device_warp drain
//     device_warp put
//     device_warp unfit
//
// Between the ranks lies the p2p fabric, or with OVER_NCCL or OVER_NVSHMEM that of NCCL or NVSHMEM.

#include "simt.h"
// after it
#if defined(OVER_NCCL)
#include "nccl_ranks.h"
#elif defined(OVER_NVSHMEM)
#include "nvshmem_ranks.h"
#else
#include "p2p_ranks.h"
#endif
#include "launch/cuda/kernels.h"
#include "launch/host/group.h"

namespace ep {
namespace {

constexpr int kMostRanks = 9;
using Notify = NotifyJoint<Ranks::Params, kMostRanks>;
using Dispatch = DispatchJoint<Ranks::Params, kMostRanks>;
using Combine = CombineJoint<Ranks::Params, kMostRanks>;
using Finish = FinishJoint<kMostRanks>;

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

size_t size_of(DType dtype) { return dtype == DType::fp64 ? 8 : dtype == DType::fp32 ? 4 : 2; }

struct Case {
    std::mt19937_64 random;
    Topology topology;
    Heap heap;
    RowFormat format;
    DType dtype;
    int index_bytes, alignment, capacity, nvl_batch, rdma_chunk, servers, carriers;
    bool fixed_rows;
    std::vector<int> tokens;

    int pick(int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); }

    explicit Case(uint64_t seed) : random(seed) {
        topology = {pick(1, 3), pick(1, 3)};
        const int local_experts = pick(1, 4);
        const int experts = local_experts * topology.world();
        const int topk = pick(1, std::min(6, experts));
        dtype = static_cast<DType>(pick(0, 3));
        const int hidden = std::vector<int>{8, 33, 64, 1, 520, 3584, 4100}[pick(0, 6)];
        const int payload = hidden * static_cast<int>(size_of(dtype));
        format = {payload, pick(0, 2) ? 0 : pick(1, 1200), 4 * pick(0, 2), topk};
        const size_t slot = format.slot_bytes();
        heap = {topology, experts, pick(1, 3), align_up(slot * pick(1, 4), Heap::kLine),
                align_up(slot * pick(1, 5), Heap::kLine)};
        index_bytes = 4 * pick(1, 2);
        alignment = pick(0, 1) ? 1 : 4;
        capacity = pick(0, 3) ? 0 : pick(1, 9);
        if (capacity) alignment = 1;
        fixed_rows = pick(0, 3) == 0;
        nvl_batch = pick(1, 8);
        const int slots = static_cast<int>(floor_power_of_two(heap.rdma_ring_bytes / slot));
        rdma_chunk = std::max(1, std::min(pick(1, 8), slots / 2));
        servers = even_warps(topology.world() - 1, pick(1, topology.world()));
        carriers = even_warps(topology.nodes - 1, pick(1, topology.nodes));
        for (int rank = 0; rank < topology.world(); ++rank)
            tokens.push_back(pick(0, 3) ? pick(0, 14) : pick(0, 1));
    }
};

// One rank's tensors for one side, host or GPU.
struct Tensors {
    Memory layout, positions, rail, out, out_scales, out_weights, y, y_weights;
    Memory sums{0};
};

struct Side {
    std::vector<Memory> heaps;
    std::vector<Memory> layouts, counts;
    std::vector<Tensors> tensors;
};

struct Inputs {
    Memory ids, x, scales, weights;
};

void fill(std::mt19937_64& random, const Memory& memory, DType dtype) {
    auto number = [&] {
        return static_cast<double>(static_cast<int64_t>(random() % 20001) - 10000) / 512;
    };
    for (size_t i = 0; i < memory.bytes() / size_of(dtype); ++i) {
        switch (dtype) {
            case DType::bf16:
                memory.as<uint16_t>()[i] = ptx::narrow_bf16(static_cast<float>(number()));
                break;
            case DType::fp16:
                memory.as<uint16_t>()[i] =
                    static_cast<uint16_t>(ptx::pack_fp16(static_cast<float>(number()), 0));
                break;
            case DType::fp32:
                memory.as<float>()[i] = static_cast<float>(number());
                break;
            case DType::fp64:
                memory.as<double>()[i] = number();
                break;
        }
    }
}

// With all the bits that a weight can have, so that products are rounded.
void fill_row_weights(std::mt19937_64& random, const Memory& memory, DType dtype) {
    auto number = [&] {
        return static_cast<double>(static_cast<int64_t>(random() % 20001) - 10000) / 3;
    };
    if (dtype == DType::fp64) {
        for (size_t i = 0; i < memory.bytes() / sizeof(double); ++i)
            memory.as<double>()[i] = number();
    } else {
        for (size_t i = 0; i < memory.bytes() / sizeof(float); ++i)
            memory.as<float>()[i] = number();
    }
}

Inputs make_inputs(Case& c, int tokens) {
    const size_t rows = static_cast<size_t>(tokens);
    Inputs in{Memory(rows * c.format.topk * c.index_bytes), Memory(rows * c.format.payload_bytes),
              Memory(rows * c.format.scale_bytes),
              Memory(rows * c.format.topk * c.format.weight_bytes)};
    for (int token = 0; token < tokens; ++token) {
        std::vector<int> experts(c.heap.num_experts);
        for (int e = 0; e < c.heap.num_experts; ++e) experts[e] = e;
        std::shuffle(experts.begin(), experts.end(), c.random);
        for (int k = 0; k < c.format.topk; ++k) {
            const int64_t id = c.pick(0, 4) ? experts[k] : -1;
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

std::vector<NotifyArgs> notify_args(const Case& c, const std::vector<Inputs>& inputs,
                                    const std::vector<Layout>& layouts, uint64_t epoch,
                                    Side& side) {
    std::vector<NotifyArgs> args;
    side.counts.clear();
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
        side.counts.emplace_back(2 * c.heap.local_experts() * sizeof(int64_t), 0x66);
        args.push_back({static_cast<int>(rank), c.heap, layouts[rank], inputs[rank].ids.data(),
                        c.index_bytes, c.alignment, c.capacity, epoch,
                        side.counts.back().as<int64_t>()});
    }
    return args;
}

TransferArgs transfer_args(const Case& c, int rank, const Layout& layout, const Tensors& t,
                           int64_t rows, uint64_t call) {
    return {rank,
            c.heap,
            layout,
            c.format,
            call,
            c.nvl_batch,
            c.rdma_chunk,
            t.positions.as<int32_t>(),
            t.rail.as<int32_t>(),
            static_cast<int64_t>(t.positions.bytes() / sizeof(int32_t)) / c.format.topk,
            static_cast<int64_t>(t.rail.bytes() / sizeof(int32_t)) / c.format.topk,
            rows};
}

std::vector<Layout> layouts_of(const Case& c, Side& side) {
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

// ---- the GPU's side

class Grid {
  public:
    Grid(Case& c, Side& side, uint64_t timeout_ns = 60'000'000'000)
        : case_(c),
          timeout_ns_(timeout_ns),
          heaps_(addresses(side)),
          fabric_(c.heap, heaps_, c.random()),
          progress_(c.topology.world() * Progress::kWords * sizeof(uint64_t), 0, "progress") {
        for (int rank = 0; rank < c.topology.world(); ++rank)
            abort_words_.push_back(&control(rank)->abort);
        reports_.resize(c.topology.world());
    }

    template <class J, class Args>
    J joint(const std::vector<Args>& args, int warps) {
        J joint{};
        joint.fabric = fabric_.params();
        joint.blocks_per_rank = ceil_div(warps, kBlockWarps);
        for (size_t i = 0; i < args.size(); ++i) {
            joint.args[i] = args[i];
            joint.progress[i] = {progress_.as<uint64_t>() + i * Progress::kWords};
            joint.ranks[i] = device_rank(i);
        }
        return joint;
    }

    // A launch of the local pass.
    template <class J>
    void launch_spread(void (*kernel)(J), J joint) {
        joint.blocks_per_rank = case_.pick(1, 2);
        launch(kernel, joint);
    }

    template <class J>
    void run(void (*kernel)(J), const J& joint, int ranks, unsigned threads = kBlockThreads) {
        simt::run(ranks, joint.blocks_per_rank, threads, case_.random(), [&] { kernel(joint); });
        ptx::end_of_launch();
    }

    template <class Args>
    void finish(const std::vector<Args>& args) {
        Finish joint{};
        joint.blocks_per_rank = kFinishBlocks;
        joint.is_transfer = true;
        for (size_t i = 0; i < args.size(); ++i) {
            joint.ranks[i] = device_rank(i);
            joint.outputs[i] = outputs_of(args[i]);
        }
        run(kernels::finish_kernel<Finish>, joint, static_cast<int>(args.size()), kFinishThreads);
    }

    template <class J>
    void launch(void (*kernel)(J), const J& joint) {
        run(kernel, joint, case_.topology.world());
        check_reports();
    }

    // The same with one of the local pass beside it.
    template <class J>
    void launch_beside(void (*kernel)(J), const J& joint, void (*local)(J)) {
        J beside = joint;
        beside.blocks_per_rank = case_.pick(1, 2);
        simt::run_beside(
            case_.topology.world(), joint.blocks_per_rank, [&] { kernel(joint); },
            beside.blocks_per_rank, [&] { local(beside); }, kBlockThreads, case_.random());
        ptx::end_of_launch();
        check_reports();
    }

    void check_reports() const {
        for (const ControlBlock& report : reports_) {
            if (report.abort) simt::die("a wait ended badly");
        }
    }

    const ControlBlock& report(int rank) const { return reports_[rank]; }
    void check_reset_signals() { fabric_.check_reset_signals(case_.random()); }

    template <class Roles>
    Roles roles() const {
        return {case_.topology.nodes, case_.topology.world(), case_.servers, case_.carriers};
    }

  private:
    static std::vector<char*> addresses(const Side& side) {
        std::vector<char*> all;
        for (const Memory& heap : side.heaps) all.push_back(heap.data());
        return all;
    }
    DeviceRank device_rank(size_t rank) {
        return {static_cast<int>(rank), case_.topology.world(), timeout_ns_, control(rank),
                &reports_[rank],        abort_words_.data(),    waited(rank)};
    }
    uint64_t* waited(size_t rank) const {
        return reinterpret_cast<uint64_t*>(heaps_[rank] + case_.heap.waited());
    }
    ControlBlock* control(size_t rank) const {
        return reinterpret_cast<ControlBlock*>(heaps_[rank] + case_.heap.control());
    }

    Case& case_;
    uint64_t timeout_ns_;
    std::vector<char*> heaps_;
    Ranks fabric_;
    std::vector<uint64_t*> abort_words_;
    std::vector<ControlBlock> reports_;
    Memory progress_;
};

template <class Args>
bool none_has_local_pass(const std::vector<Args>& args) {
    return std::none_of(args.begin(), args.end(), [](const Args& a) { return has_local_pass(a); });
}

template <bool kWeighted>
void combine_on(Grid& grid, const Combine& joint, DType dtype) {
    with_type(dtype, [&]<class T>() {
        const auto kernel = kernels::combine_kernel<T, kWeighted, Combine>;
        if (joint.ends_call) return grid.launch(kernel, joint);
        grid.launch_beside(kernel, joint, kernels::sums_kernel<T, kWeighted, Combine>);
    });
}

void expect_equal(uint64_t seed, int rank, const char* what, const Memory& ours,
                  const Memory& expected) {
    if (std::memcmp(ours.data(), expected.data(), expected.bytes()) == 0) return;
    size_t i = 0;
    while (ours.data()[i] == expected.data()[i]) ++i;
    std::fprintf(stderr, "seed %llu: %s of rank %d differs at byte %zu of %zu\n",
                 static_cast<unsigned long long>(seed), what, rank, i, expected.bytes());
    std::exit(1);
}

void run_case(uint64_t seed) {
    Case c(seed);
    const int world = c.topology.world();
    Side host, gpu;
    std::vector<int> ranks;
    std::vector<char*> host_heaps;
    for (int rank = 0; rank < world; ++rank) {
        ranks.push_back(rank);
        for (Side* side : {&host, &gpu}) side->heaps.emplace_back(c.heap.bytes(), 0, "a heap");
        host_heaps.push_back(host.heaps.back().data());
    }
    HostGroup group(c.heap, ranks, host_heaps, Schedule{}, std::chrono::seconds(20));
    Grid grid(c, gpu);
    uint64_t call = 0;
    for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
        const bool weighted = (epoch + seed) % 2;
        std::vector<Inputs> inputs;
        for (const int tokens : c.tokens) inputs.push_back(make_inputs(c, tokens));
        const auto host_layouts = layouts_of(c, host), gpu_layouts = layouts_of(c, gpu);
        group.notify<HostWarp>(notify_args(c, inputs, host_layouts, epoch, host));
        const auto notify =
            grid.joint<Notify>(notify_args(c, inputs, gpu_layouts, 0, gpu), c.heap.channels + 1);
        grid.launch(kernels::notify_kernel<Notify>, notify);
        for (int rank = 0; rank < world; ++rank) {
            expect_equal(seed, rank, "layout", gpu.layouts[rank], host.layouts[rank]);
            expect_equal(seed, rank, "tokens per expert", gpu.counts[rank], host.counts[rank]);
        }

        std::vector<int64_t> rows;
        std::vector<Memory> expert_out, gradients, row_weights;
        for (Side* side : {&host, &gpu}) {
            const auto& layouts = side == &host ? host_layouts : gpu_layouts;
            side->tensors.clear();
            rows.clear();
            for (int rank = 0; rank < world; ++rank) {
                const Layout::Totals& totals = layouts[rank].totals();
                rows.push_back(c.fixed_rows
                                   ? 1 + totals.expert_rows * static_cast<int>(seed % 4 + 1) / 4
                                   : totals.expert_rows);
                const size_t r = rows.back(), k = c.format.topk, t = c.tokens[rank];
                const size_t received = std::min<size_t>(totals.received_rows, r);
                side->tensors.push_back({Memory(0), Memory(received * k * sizeof(int32_t), 0x22),
                                         Memory(totals.rail_rows * k * sizeof(int32_t), 0x22),
                                         Memory(r * c.format.payload_bytes, 0x33),
                                         Memory(r * c.format.scale_bytes, 0x33),
                                         Memory(r * c.format.weight_bytes, 0x33),
                                         Memory(t * c.format.payload_bytes, 0x44),
                                         Memory(t * k * c.format.weight_bytes, 0x44),
                                         Memory((received + 1) * c.format.payload_bytes, 0x22)});
            }
        }
        std::vector<DispatchArgs> dispatch[2];
        std::vector<CombineArgs> combine[2];
        const bool may_pass[] = {c.pick(0, 1) == 0, c.pick(0, 1) == 0};  // dispatch, combine
        ++call;
        for (int rank = 0; rank < world; ++rank) {
            expert_out.emplace_back(rows[rank] * c.format.payload_bytes);
            gradients.emplace_back(rows[rank] * c.format.weight_bytes, 0x55);
            fill(c.random, expert_out.back(), c.dtype);
            row_weights.emplace_back(
                weighted ? rows[rank] * (c.dtype == DType::fp64 ? sizeof(double) : sizeof(float))
                         : 0);
            fill_row_weights(c.random, row_weights.back(), c.dtype);
        }
        for (const int on_gpu : {0, 1}) {
            const Side& side = on_gpu ? gpu : host;
            const auto& layouts = on_gpu ? gpu_layouts : host_layouts;
            for (int rank = 0; rank < world; ++rank) {
                const Tensors& t = side.tensors[rank];
                const Inputs& in = inputs[rank];
                dispatch[on_gpu].push_back(
                    {transfer_args(c, rank, layouts[rank], t, rows[rank], call), in.x.data(),
                     in.scales.data(), in.weights.data(), t.out.data(), t.out_scales.data(),
                     t.out_weights.data(), may_pass[0] && c.pick(0, 1)});
                combine[on_gpu].push_back(
                    {transfer_args(c, rank, layouts[rank], t, rows[rank], call + 1),
                     expert_out[rank].data(), gradients[rank].data(), t.y.data(),
                     t.y_weights.data(), weighted ? row_weights[rank].data() : nullptr,
                     may_pass[1] && c.pick(0, 1) ? t.sums.data() : nullptr});
            }
        }
        ++call;
        group.dispatch<HostWarp>(dispatch[0]);
        const auto dispatch_roles = grid.roles<DispatchRoles>();
        auto dispatch_joint =
            grid.joint<Dispatch>(dispatch[1], dispatch_roles.warps() * c.heap.channels);
        dispatch_joint.roles = dispatch_roles;
        dispatch_joint.ends_call = none_has_local_pass(dispatch[1]);
        if (dispatch_joint.ends_call) {
            grid.launch(kernels::dispatch_kernel<Dispatch>, dispatch_joint);
        } else {
            grid.launch_beside(kernels::dispatch_kernel<Dispatch>, dispatch_joint,
                               kernels::own_rows_kernel<Dispatch>);
            grid.launch_spread(kernels::local_pass_of_dispatch_kernel<Dispatch>, dispatch_joint);
            grid.finish(dispatch[1]);
        }
        group.combine<HostWarp>(combine[0], c.dtype);
        const auto combine_roles = grid.roles<CombineRoles>();
        auto combine_joint =
            grid.joint<Combine>(combine[1], combine_roles.warps() * c.heap.channels);
        combine_joint.roles = combine_roles;
        combine_joint.ends_call = none_has_local_pass(combine[1]);
        weighted ? combine_on<true>(grid, combine_joint, c.dtype)
                 : combine_on<false>(grid, combine_joint, c.dtype);
        if (!combine_joint.ends_call) grid.finish(combine[1]);
        for (const Memory& heap : gpu.heaps) {
            const ControlBlock* block = heap.as<ControlBlock>();
            const bool is_counted =
                block->entered.notify == epoch && block->finished.notify == epoch &&
                block->entered.transfer == call && block->finished.transfer == call;
            if (!is_counted) simt::die("calls are not counted");
        }
        if (group.state(0).aborted()) simt::die("the host gave up");
        for (int rank = 0; rank < world; ++rank) {
            const Tensors &ours = gpu.tensors[rank], &expected = host.tensors[rank];
            expect_equal(seed, rank, "layout", gpu.layouts[rank], host.layouts[rank]);
            expect_equal(seed, rank, "positions", ours.positions, expected.positions);
            expect_equal(seed, rank, "rail experts", ours.rail, expected.rail);
            expect_equal(seed, rank, "x", ours.out, expected.out);
            expect_equal(seed, rank, "scales", ours.out_scales, expected.out_scales);
            expect_equal(seed, rank, "weights", ours.out_weights, expected.out_weights);
            expect_equal(seed, rank, "y", ours.y, expected.y);
            expect_equal(seed, rank, "gradients of weights", ours.y_weights, expected.y_weights);
        }
    }
    grid.check_reset_signals();
}

// Two ranks of 8 tokens.
Case small_case(bool several_nodes) {
    Case c(1);
    c.topology = several_nodes ? Topology{2, 1} : Topology{1, 2};
    c.format = {64, 0, 4, 2};
    c.heap = {c.topology, 4, 2, align_up(c.format.slot_bytes(), Heap::kLine),
              align_up(c.format.slot_bytes(), Heap::kLine)};
    c.tokens = {8, 8};
    c.servers = 1;
    c.carriers = 1;
    return c;
}

// Rank 0 of two runs alone: every wait ends, says for what it waited, and tells the other rank and
// the host.
void run_absent(bool several_nodes) {
    Case c = small_case(several_nodes);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    std::vector<Inputs> inputs;
    for (const int tokens : c.tokens) inputs.push_back(make_inputs(c, tokens));
    const auto layouts = layouts_of(c, side);
    Grid grid(c, side, 50'000'000);
    auto notify = notify_args(c, inputs, layouts, 0, side);
    notify.pop_back();
    const auto joint = grid.joint<Notify>(notify, c.heap.channels + 1);
    grid.run(kernels::notify_kernel<Notify>, joint, 1);
    const ControlBlock& report = grid.report(0);
    const Wait wait = several_nodes ? Wait::NotifyRail : Wait::NotifyNode;
    const Incident& incident = report.incidents[0];
    const bool named = incident.outcome == Outcome::Timeout && incident.role == Role::Notify &&
                       incident.wait == wait && incident.rank == 0 && incident.peer == 1 &&
                       incident.seen == 0 && incident.expected == 1;
    if (!named || report.incidents[1].outcome != Outcome::Ok)
        simt::die("the wait for an absent rank is not reported as it was");
    for (const Memory& heap : side.heaps) {
        if (heap.as<ControlBlock>()->abort != ControlBlock::abort_word(Outcome::Timeout, 0))
            simt::die("a rank is not told that another gave up");
    }
    if (report.abort != ControlBlock::abort_word(Outcome::Timeout, 0))
        simt::die("the host is not told that a rank gave up");
    const ControlBlock* blocks[] = {side.heaps[0].as<ControlBlock>(),
                                    side.heaps[1].as<ControlBlock>()};
    const bool is_counted = blocks[0]->entered.notify == 1 && blocks[0]->finished.notify == 0 &&
                            blocks[1]->entered.notify == 0;
    if (!is_counted) simt::die("it cannot be seen who has not come");
    const uint64_t* waited = reinterpret_cast<uint64_t*>(side.heaps[0].data() + c.heap.waited());
    if (waited[0] || waited[1]) simt::die("a wait that never ended is counted");
}

template <bool kNetwork, class J>
void open_ring(const J joint) {
    typename J::Fabric fabric(joint.fabric, 0);
    DeviceWarp warp(joint.ranks[0], 1, Role::RdmaSender, 0, kernels::bulk_buffers());
    const Rings<typename J::Fabric> rings{fabric, joint.args[0], 0};
    kNetwork ? open_rdma_rings(warp, rings, 0, 1) : open_rings_of_node(warp, rings, 0);
}

// A ring to rank 1 whose last row has not been read: a call with rows of another size does not
// begin to use it, nor does any where nothing orders the puts of two calls.
template <bool kNetwork>
void run_drain(bool same_size) {
    Case c = small_case(kNetwork);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    const auto layouts = layouts_of(c, side);
    const Tensors none{Memory(0), Memory(0), Memory(0), Memory(0),
                       Memory(0), Memory(0), Memory(0), Memory(0)};
    Grid grid(c, side, 50'000'000);
    const std::vector<DispatchArgs> args{{transfer_args(c, 0, layouts[0], none, 0, 1)}};
    const size_t ring = kNetwork ? c.heap.rdma_out(0, 1) : c.heap.nvl_out(0, 0, 1);
    *reinterpret_cast<OutCursor*>(side.heaps[0].data() + ring) = {
        1, 1, c.format.slot_bytes() / (same_size ? 1 : 2)};
    grid.run(open_ring<kNetwork, Dispatch>, grid.joint<Dispatch>(args, 1), 1, 32);
    const Incident& incident = grid.report(0).incidents[0];
    const bool drains = !same_size || (kNetwork && !Ranks::Params::Fabric::kOrdersWarps);
    if (incident.wait != (!drains ? Wait::None : kNetwork ? Wait::RdmaDrain : Wait::NvlDrain))
        simt::die("a ring is not opened as it should be");
}

// A row that the copy engine has written is put, and its flag after it: the other node finds it.
void run_put(uint64_t seed) {
    constexpr size_t kBytes = 4096;
    Case c = small_case(true);
    c.random.seed(seed);
    c.heap = {c.topology, 4, 1, Heap::kLine, kBytes};
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    const Memory row(kBytes, 0x12);
    Grid grid(c, side, 1'000'000'000);
    const auto joint = grid.joint<Notify>(std::vector<NotifyArgs>(2), 1);
    simt::run(2, 1, 32, seed, [&] {
        const int rank = static_cast<int>(blockIdx.x);
        Notify::Fabric fabric(joint.fabric, rank);
        DeviceWarp warp(joint.ranks[rank], 1, Role::SenderCoordinator, 0, kernels::bulk_buffers());
        const size_t data = c.heap.rdma_data(0, 0, 1), flag = c.heap.rdma_tail(0, 0);
        if (rank == 0) {
            const size_t staging = c.heap.rdma_staging(0, 1, 0);
            warp.copy<Reuse::Soon>(fabric.own<char>(staging), row.data(), kBytes);
            fabric.put(warp, 0, 1, data, staging, kBytes);
            fabric.put_signal(warp, 0, 1, flag, 0, 1);
            return;
        }
        warp.wait_all(Wait::RdmaRow, 1,
                      [&](int) { return Need{fabric.acquire_signal<DeviceWarp>(0, flag), 1, 0}; });
        warp.lanes(32, [&](int lane) {
            for (size_t i = lane; i < kBytes; i += 32) {
                if (fabric.own<char>(data)[i] != row.data()[i]) simt::die("a flag without its row");
            }
        });
    });
    ptx::end_of_launch();
}

// Rank 1 finds its abort word set: then it can read what rank 0 was waiting for, whole.
void run_incident(uint64_t seed) {
    Case c = small_case(false);
    c.random.seed(seed);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    Grid grid(c, side);
    const auto joint = grid.joint<Notify>(std::vector<NotifyArgs>(2), 1);
    ControlBlock* blocks[] = {side.heaps[0].as<ControlBlock>(), side.heaps[1].as<ControlBlock>()};
    // of one lane's writes only those before its warp last met are known to be released
    simt::order::ignore(blocks[0]->incidents, sizeof(blocks[0]->incidents));
    simt::run(2, 1, 32, seed, [&] {
        const DeviceRank& rank = joint.ranks[blockIdx.x];
        DeviceWarp warp(rank, 7, Role::Receiver, 0, kernels::bulk_buffers());
        if (rank.rank == 0) return warp.fail(Outcome::Mismatch, Wait::None, Need{11, 12, 1});
        warp.lanes(1, [&](int) {
            while (!ptx::load_acquire_sys(&rank.control->abort)) simt::yield();
            const Incident& incident = blocks[0]->incidents[0];
            if (!ptx::load_acquire_sys(&blocks[0]->complete[0]) || incident.expected != 12 ||
                !grid.report(0).complete[0])
                simt::die("a rank is told that another gave up before it can see why");
        });
    });
}

// Only what a wait took that lasted is counted, and only for the rank that was missing in the end.
void run_waits() {
    Case c = small_case(false);
    Side side;
    for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
    Grid grid(c, side);
    const auto joint = grid.joint<Notify>(std::vector<NotifyArgs>(2), 1);
    constexpr uint64_t kLate = 20'000'000;  // ns
    char* heap = side.heaps[0].data();
    uint64_t* flag = reinterpret_cast<uint64_t*>(heap + c.heap.nvl_tail(0, 0, 1));
    const uint64_t* waited = reinterpret_cast<uint64_t*>(heap + c.heap.waited());
    simt::run(2, 1, 32, 1, [&] {
        const DeviceRank& rank = joint.ranks[blockIdx.x];
        DeviceWarp warp(rank, 7, Role::Receiver, 0, kernels::bulk_buffers());
        const auto need = [&](int lane) {
            if (lane == 0) return Need{1, 1, 0};
            return Need{DeviceWarp::acquire<Scope::System>(flag), 1, 1};
        };
        if (rank.rank == 0) {
            warp.wait_all(Wait::NvlRow, 2, need);
            const uint64_t once = ptx::load_relaxed_sys(waited + 1);
            warp.wait_all(Wait::NvlRow, 2, need);
            if (ptx::load_relaxed_sys(waited + 1) != once) simt::die("a met wait is counted");
        } else {
            warp.lanes(1, [&](int) {
                const uint64_t start = ptx::globaltimer();
                while (ptx::globaltimer() - start < kLate) simt::yield();
                ptx::store_release_sys(flag, 1);
            });
        }
    });
    if (waited[1] < kLate / 2 || waited[0]) simt::die("a wait is not counted for whom it was");
}

bool is_poison(const Memory& memory) {
    return std::all_of(memory.data(), memory.data() + memory.bytes(),
                       [](char byte) { return static_cast<uint8_t>(byte) == Outputs::kPoison; });
}

// Rank 1 of two comes to the notify, but not to the dispatch, or the combine, of `tokens` each:
// nobody can take for data what rank 0 made of it, nor what a rank gets that comes too late; and
// the handle of such a dispatch is refused.
void run_given_up(bool several_nodes, bool in_notify, int tokens, bool ends_call) {
    Case c = small_case(several_nodes);
    c.tokens = {tokens, tokens};
    c.format = {66, 12, 4, 2};  // no piece of the outputs is aligned
    c.heap = {c.topology, 4, 2, align_up(c.format.slot_bytes(), Heap::kLine),
              align_up(c.format.slot_bytes(), Heap::kLine)};
    Side side;
    std::vector<Inputs> inputs;
    for (int rank = 0; rank < 2; ++rank) {
        side.heaps.emplace_back(c.heap.bytes());
        inputs.push_back(make_inputs(c, tokens));
        for (int i = 0; i < tokens * c.format.topk; ++i) {  // all of them go to the other rank
            const int expert = 2 * (1 - rank) + i % 2;
            if (c.index_bytes == 8) {
                inputs.back().ids.as<int64_t>()[i] = expert;
            } else {
                inputs.back().ids.as<int32_t>()[i] = expert;
            }
        }
    }
    const auto layouts = layouts_of(c, side);
    Grid grid(c, side, 50'000'000);
    auto notify = notify_args(c, inputs, layouts, 0, side);
    if (in_notify) notify.pop_back();
    grid.run(kernels::notify_kernel<Notify>, grid.joint<Notify>(notify, c.heap.channels + 1),
             static_cast<int>(notify.size()));
    if ((grid.report(0).abort != 0) != in_notify) simt::die("the wrong step gave up");
    for (int expert = 0; expert < c.heap.local_experts(); ++expert) {
        const int64_t rows = side.counts[0].as<int64_t>()[expert];
        if ((rows == -1) != in_notify) simt::die("numbers of rows that nobody has exchanged");
    }
    if ((layouts[0].totals().overflow != 0) != in_notify)
        simt::die("no overflow where nobody knows the rows");

    const size_t rows = tokens * c.format.topk;
    for (int rank = 0; rank < 2; ++rank) {
        side.tensors.push_back({Memory(0), Memory(rows * c.format.topk * sizeof(int32_t), 0x22),
                                Memory(rows * c.format.topk * sizeof(int32_t), 0x22),
                                Memory(rows * c.format.payload_bytes, 0x33),
                                Memory(rows * c.format.scale_bytes, 0x33),
                                Memory(rows * c.format.weight_bytes, 0x33),
                                Memory(tokens * c.format.payload_bytes, 0x44),
                                Memory(rows * c.format.weight_bytes, 0x44)});
    }
    std::vector<DispatchArgs> dispatch;
    std::vector<CombineArgs> combine;
    for (int rank = 0; rank < 2; ++rank) {
        const Tensors& t = side.tensors[rank];
        TransferArgs args = transfer_args(c, rank, layouts[rank], t, rows, 1);
        args.fills_tables = true;
        const Inputs& in = inputs[rank];
        dispatch.push_back({args, in.x.data(), in.scales.data(), in.weights.data(), t.out.data(),
                            t.out_scales.data(), t.out_weights.data()});
        args.is_combine = true;
        args.fills_tables = false;
        combine.push_back(
            {args, t.out.data(), t.out_weights.data(), t.y.data(), t.y_weights.data()});
    }
    const std::vector<DispatchArgs> alone{dispatch[0]};
    const auto dispatch_roles = grid.roles<DispatchRoles>();
    auto dispatch_joint = grid.joint<Dispatch>(alone, dispatch_roles.warps() * c.heap.channels);
    dispatch_joint.roles = dispatch_roles;
    dispatch_joint.ends_call = ends_call;
    grid.run(kernels::dispatch_kernel<Dispatch>, dispatch_joint, 1);
    if (!ends_call) grid.finish(alone);
    if (!grid.report(0).abort) simt::die("rank 0 did without rank 1");
    const ControlBlock* blocks[] = {side.heaps[0].as<ControlBlock>(),
                                    side.heaps[1].as<ControlBlock>()};
    const bool is_counted = blocks[0]->entered.transfer == !in_notify &&
                            blocks[0]->finished.transfer == 0 && blocks[1]->entered.transfer == 0;
    if (!is_counted) simt::die("it cannot be seen who has not come to the dispatch");
    const Tensors& lone = side.tensors[0];
    for (const Memory* memory : {&lone.out, &lone.out_scales, &lone.out_weights}) {
        if (!is_poison(*memory))
            simt::die("what a dispatch that was given up left looks like data");
    }
    if (layouts[0].totals().epoch) simt::die("the handle of a dispatch that was given up is good");
    if (in_notify) return;
    const auto roles = grid.roles<CombineRoles>();
    auto all = grid.joint<Combine>(combine, roles.warps() * c.heap.channels);
    all.roles = roles;
    all.ends_call = ends_call;
    grid.run(kernels::combine_kernel<float, false, Combine>, all, 2);
    if (!ends_call) grid.finish(combine);
    for (const Tensors& t : side.tensors) {
        if (!is_poison(t.y) || !is_poison(t.y_weights))
            simt::die("what a combine after it left looks like data");
    }
    if (!layouts[1].totals().epoch) simt::die("a combine made a handle useless");
}

// What a handle of a call that failed may hold: a layout that was never made, or tables that are
// too small. Nothing is read or written through them, and the host is told why.
void run_unfit() {
    Case c = small_case(true);
    const auto expect = [](const Grid& grid, Outcome outcome, const char* what) {
        const ControlBlock& report = grid.report(0);
        if (ControlBlock::outcome_of(report.abort) != outcome ||
            report.incidents[0].outcome != outcome)
            simt::die(what);
    };
    const Tensors none{Memory(0), Memory(0), Memory(0), Memory(0),
                       Memory(0), Memory(0), Memory(0), Memory(0)};
    const Memory y(8 * c.format.payload_bytes), weights(8 * c.format.topk * c.format.weight_bytes);
    const auto args_of = [&](const std::vector<Layout>& layouts) {
        std::vector<CombineArgs> args;
        for (int rank = 0; rank < 2; ++rank) {
            args.push_back({transfer_args(c, rank, layouts[rank], none, 0, 1)});
            args.back().is_combine = true;
            args.back().y = y.data();  // rank 0's: all tokens are for its first expert
            args.back().y_weights = weights.data();
        }
        return args;
    };
    const auto make_side = [&] {
        Side side;
        for (int rank = 0; rank < 2; ++rank) side.heaps.emplace_back(c.heap.bytes(), 0, "a heap");
        return side;
    };
    {
        Side side = make_side();
        Grid grid(c, side);
        const auto layouts = layouts_of(c, side);
        std::vector<DispatchArgs> args;
        for (const CombineArgs& a : args_of(layouts))
            args.push_back({static_cast<const TransferArgs&>(a)});
        for (DispatchArgs& a : args) a.max_rows = 1 << 20;
        auto joint = grid.joint<Dispatch>(args, kBlockWarps);
        joint.roles = grid.roles<DispatchRoles>();
        grid.run(kernels::dispatch_kernel<Dispatch>, joint, 2);
        expect(grid, Outcome::NoLayout, "dispatch goes on without a layout");
    }
    for (const bool has_layout : {false, true}) {
        Side side = make_side();
        Grid grid(c, side);
        const auto layouts = layouts_of(c, side);
        if (has_layout) {
            for (int rank = 0; rank < 2; ++rank) {
                const Layout& layout = layouts[rank];
                std::memset(layout.data, 0, layout.size() * sizeof(int32_t));
                layout.totals().epoch = 1;
                for (int channel = 0; channel < c.heap.channels; ++channel)
                    layout.rail(channel, 1 - rank) = 1 << 20;
            }
        }
        const auto roles = grid.roles<CombineRoles>();
        auto joint = grid.joint<Combine>(args_of(layouts), roles.warps() * c.heap.channels);
        joint.roles = roles;
        grid.run(kernels::combine_kernel<float, false, Combine>, joint, 2);
        expect(grid, has_layout ? Outcome::Overflow : Outcome::NoLayout,
               "combine goes on with an unfit handle");
    }
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    if (argc == 2 && std::string(argv[1]) == "absent") {
        for (const bool several_nodes : {false, true}) ep::run_absent(several_nodes);
        std::printf("an absent rank is reported\n");
        return 0;
    }
    if (argc == 2 && std::string(argv[1]) == "incident") {
        for (uint64_t seed = 0; seed < 50; ++seed) ep::run_incident(seed);
        std::printf("an incident is there before the word\n");
        return 0;
    }
    if (argc == 2 && std::string(argv[1]) == "waits") {
        ep::run_waits();
        std::printf("waits are counted\n");
        return 0;
    }
    if (argc == 2 && std::string(argv[1]) == "given_up") {
        for (const bool several_nodes : {false, true}) {
            for (const bool in_notify : {false, true}) {
                for (const int tokens : {1, 9, 40}) {
                    for (const bool ends_call : {false, true})
                        ep::run_given_up(several_nodes, in_notify, tokens, ends_call);
                }
            }
        }
        std::printf("what was given up is no data\n");
        return 0;
    }
    if (argc == 2 && std::string(argv[1]) == "drain") {
        for (const bool same_size : {false, true}) {
            ep::run_drain<false>(same_size);
            ep::run_drain<true>(same_size);
        }
        std::printf("a ring runs empty between calls\n");
        return 0;
    }
    if (argc == 2 && std::string(argv[1]) == "put") {
        for (uint64_t seed = 0; seed < 20; ++seed) ep::run_put(seed);
        std::printf("a row is there before its flag\n");
        return 0;
    }
    if (argc == 2 && std::string(argv[1]) == "unfit") {
        ep::run_unfit();
        std::printf("an unfit handle is reported\n");
        return 0;
    }
    if (argc != 3) return 2;
    const uint64_t first = std::strtoull(argv[1], nullptr, 10),
                   end = std::strtoull(argv[2], nullptr, 10);
    for (uint64_t seed = first; seed < end; ++seed) {
        std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
        ep::run_case(seed);
    }
    std::printf("%llu cases\n", static_cast<unsigned long long>(end - first));
}
