// The CUDA kernels, lane by lane on the host (simt/simt.h): for random cases they must give the
// bits that the host gives.
//
//     device_warp FIRST_SEED END_SEED
//     device_warp planned FIRST_SEED END_SEED
//                                          with layouts that all ranks know beforehand
//     device_warp absent
//     device_warp incident
//     device_warp waits
//     device_warp given_up
//     device_warp drain
//     device_warp put
//     device_warp unfit
//
// Between the ranks lies the p2p fabric, or with OVER_NCCL, OVER_NVSHMEM or OVER_QUEUE another.

#include "normal_failures.h"
// after it
#include "launch/host/group.h"
#include "programs.h"
#include "random_moves.h"

namespace ep {
namespace {

template <class Args>
bool any_intra_rank_pass(const std::vector<Args>& args) {
    return std::any_of(args.begin(), args.end(),
                       [](const Args& a) { return has_intra_rank_pass(a); });
}

void dispatch_on(Grid& grid, const std::vector<DispatchArgs>& args) {
    auto params = grid.params_of_roles<Dispatch>(args);
    const auto kernel = kernels::dispatch_kernel<Dispatch>;
    if (!any_intra_rank_pass(args)) return grid.launch(kernel, params);
    params.ends_call = false;
    grid.launch_beside(kernel, params, kernels::own_rows_kernel<Dispatch>);
    params.ends_call = true;
    grid.launch_spread(kernels::intra_rank_permute_kernel<Dispatch>, params);
}

// Launched before anyone knew that the guess was wrong, in one of four ways: nothing comes of it.
// Then with a right one, unless rows do not fit, which their launch has to find out.
void dispatch_too_early(Grid& grid, std::vector<DispatchArgs>& args, uint64_t way) {
    std::vector<DispatchArgs> wrong = args;
    for (DispatchArgs& a : wrong) {
        const Layout::Totals& totals = a.layout.totals();
        const int rows = a.is_flat ? totals.received_rows : totals.expert_rows;
        a.is_speculative = true;
        switch (way++ % 4) {
            case 0:
                a.max_rows = rows - 1;
                break;
            case 1:
                a.min_rows = rows + 1;
                break;
            case 2:
                a.max_received = totals.received_rows - 1;
                break;
            default:
                a.max_rail = totals.rail_rows - 1;
        }
    }
    dispatch_on(grid, wrong);
    for (DispatchArgs& a : args) a.is_speculative = a.fits(a.layout.totals());
}

template <bool kWeighted>
void combine_on(Grid& grid, const Combine& params, DType dtype, bool any_intra_rank_pass) {
    with_summed_type(dtype, [&]<class T>() {
        const auto kernel = kernels::combine_kernel<T, kWeighted, Combine>;
        if (!any_intra_rank_pass) return grid.launch(kernel, params);
        grid.launch_beside(kernel, params,
                           kernels::intra_rank_reduce_kernel<T, kWeighted, Combine>);
    });
}

void expect_equal(int rank, const std::string& what, const Memory& ours, const Memory& expected) {
    if (std::memcmp(ours.data(), expected.data(), expected.bytes()) == 0) return;
    size_t i = 0;
    while (ours.data()[i] == expected.data()[i]) ++i;
    const std::string text = what + " of rank " + std::to_string(rank) + " differs at byte " +
                             std::to_string(i) + " of " + std::to_string(expected.bytes());
    simt::die(text.c_str());
}

// Tensors for a call on each side. Returns the rows of each rank's expert-grouped output.
std::vector<int64_t> make_tensors(const Case& c, uint64_t seed, const std::vector<Layout>& layouts,
                                  std::initializer_list<Side*> sides) {
    std::vector<int64_t> rows;
    for (const Layout& layout : layouts) {
        const Layout::Totals& totals = layout.totals();
        const int all = c.flat ? totals.received_rows : totals.expert_rows;
        rows.push_back(c.fixed_rows ? 1 + all * static_cast<int>(seed % 4 + 1) / 4 : all);
    }
    for (Side* side : sides) {
        side->tensors.clear();
        for (size_t rank = 0; rank < layouts.size(); ++rank) {
            const Layout::Totals& totals = layouts[rank].totals();
            const size_t room = rows[rank];
            side->tensors.push_back(tensors_of(
                c, c.tokens[rank], room,
                c.flat ? room : std::min<size_t>(totals.received_rows, room), totals.rail_rows));
        }
    }
    return rows;
}

void check_counted(const Side& side, uint64_t notifies, uint64_t call) {
    for (const Memory& heap : side.heaps) {
        const ControlBlock* block = heap.as<ControlBlock>();
        const bool is_counted = block->entered.notify == notifies &&
                                block->finished.notify == notifies &&
                                block->entered.transfer == call && block->finished.transfer == call;
        if (!is_counted) simt::die("calls are not counted");
    }
}

using Waited = std::vector<std::vector<uint64_t>>;

// How long each rank has waited for each, made other numbers than when the last call began.
Waited other_waits(const Case& c, const Side& side) {
    Waited of_ranks;
    for (const Memory& heap : side.heaps) {
        uint64_t* waited = reinterpret_cast<uint64_t*>(heap.data() + c.heap.waited());
        of_ranks.emplace_back();
        for (int other = 0; other < c.topology.world(); ++other)
            of_ranks.back().push_back(++waited[other]);
    }
    return of_ranks;
}

// No notify begins a call by a plan: its dispatch notes what was waited before, and says what it
// is.
void check_planned(const Case& c, const Side& side, const Waited& waited, uint64_t call) {
    for (size_t rank = 0; rank < side.heaps.size(); ++rank) {
        const Memory& heap = side.heaps[rank];
        const size_t bytes = waited[rank].size() * sizeof(uint64_t);
        if (std::memcmp(heap.data() + c.heap.waited_before(), waited[rank].data(), bytes))
            simt::die("a call by a plan does not begin");
        const uint64_t word = heap.as<ControlBlock>()->sends_in(Sends::Mode::Transfer, call);
        if (Sends::of(word).kind != Sends::Kind::PlannedDispatch)
            simt::die("a call by a plan does not say that it is one");
    }
}

void expect_same_results(int rank, const Side& gpu, const Side& host) {
    const Tensors &ours = gpu.tensors[rank], &expected = host.tensors[rank];
    expect_equal(rank, "layout", gpu.layouts[rank], host.layouts[rank]);
    expect_equal(rank, "dst_rows", ours.dst_rows, expected.dst_rows);
    expect_equal(rank, "rail experts", ours.rail, expected.rail);
    expect_equal(rank, "source tokens", ours.source_tokens, expected.source_tokens);
    expect_equal(rank, "x", ours.out, expected.out);
    expect_equal(rank, "scales", ours.out_scales, expected.out_scales);
    expect_equal(rank, "weights", ours.out_weights, expected.out_weights);
    expect_equal(rank, "y", ours.y, expected.y);
    expect_equal(rank, "gradients of weights", ours.y_weights, expected.y_weights);
}

void run_case(uint64_t seed, bool is_planned) {
    Case c(seed);
    const int world = c.topology.world();
    if (is_planned) c.fixed_rows = false;
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
    uint64_t call = 0, replays = 0;
    for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
        const bool weighted = (epoch + seed) % 2;
        std::optional<RandomMoves> plan;
        if (is_planned) c.tokens = plan.emplace(c.random, c.topology, 14, c.format.topk).tokens;
        std::vector<Inputs> inputs;
        for (const int tokens : c.tokens) inputs.push_back(make_inputs(c, tokens));
        auto host_layouts = layouts_of(c, host), gpu_layouts = layouts_of(c, gpu);
        for (auto* layouts : {&host_layouts, &gpu_layouts})
            for (Layout& layout : *layouts) layout.is_planned = is_planned;
        const auto notify = notify_args(c, inputs, gpu_layouts, 0, gpu);
        const bool is_fused = !is_planned && c.topology.nodes == 1 && world > 1 && c.pick(0, 1);
        if (is_planned) {
            for (int rank = 0; rank < world; ++rank) {
                for (const auto& layouts : {host_layouts, gpu_layouts})
                    plan->lay_out(layouts[rank], rank, epoch);
            }
        } else {
            group.notify<HostWarp>(notify_args(c, inputs, host_layouts, epoch, host));
        }
        if (!is_fused && !is_planned) {
            const int blocks = static_cast<int>(1 + seed % 2);  // which meet
            const int warps = std::max(blocks * kBlockWarps, c.heap.channels + 1);
            grid.launch(kernels::notify_kernel<Notify>, grid.params<Notify>(notify, warps));
            for (int rank = 0; rank < world; ++rank)
                expect_equal(rank, "layout", gpu.layouts[rank], host.layouts[rank]);
        }

        const std::vector<int64_t> rows = make_tensors(c, seed, host_layouts, {&host, &gpu});
        std::vector<Memory> expert_out, gradients, row_weights;
        std::vector<DispatchArgs> dispatch[2];
        std::vector<CombineArgs> combine[2];
        const bool may_pass[] = {c.pick(0, 1) == 0, c.pick(0, 1) == 0};  // dispatch, combine
        const int sum_warps = c.pick(1, CombineArgs::kMaxSumWarps);
        ++call;
        for (int rank = 0; rank < world; ++rank) {
            expert_out.emplace_back(rows[rank] * c.format.payload_bytes);
            gradients.emplace_back(
                rows[rank] * (c.flat ? c.format.topk : 1) * c.format.weight_bytes, 0x55);
            fill(c.random, expert_out.back(), c.dtype);
            row_weights.emplace_back(
                weighted ? rows[rank] * (c.dtype == DType::fp64 ? sizeof(double) : sizeof(float))
                         : 0);
            fill(c.random, row_weights.back(), c.dtype == DType::fp64 ? c.dtype : DType::fp32, 3);
        }
        for (const int on_gpu : {0, 1}) {
            const Side& side = on_gpu ? gpu : host;
            const auto& layouts = on_gpu ? gpu_layouts : host_layouts;
            for (int rank = 0; rank < world; ++rank) {
                const Tensors& t = side.tensors[rank];
                const Inputs& in = inputs[rank];
                dispatch[on_gpu].push_back(
                    dispatch_args(transfer_args(c, rank, layouts[rank], t, rows[rank], call), in, t,
                                  may_pass[0] && !is_fused && c.pick(0, 1) && !c.flat));
                dispatch[on_gpu].back().source_tokens = t.source_tokens.as<int32_t>();
                dispatch[on_gpu].back().has_all_weights = c.flat && seed / 4 % 2;
                dispatch[on_gpu].back().fills_tables = c.flat || is_planned;
                combine[on_gpu].push_back(
                    {transfer_args(c, rank, layouts[rank], t, rows[rank], call + 1),
                     expert_out[rank].data(), gradients[rank].data(), t.y.data(),
                     t.y_weights.data(), weighted ? row_weights[rank].data() : nullptr,
                     may_pass[1] && c.pick(0, 1) && !c.flat ? t.sums.data() : nullptr, sum_warps});
                const int biases = static_cast<int>(seed % 3);
                if (biases > 0) combine[on_gpu].back().bias[0] = in.x.data();
                if (biases > 1) combine[on_gpu].back().bias[1] = in.x.data();
            }
        }
        ++call;
        group.dispatch<HostWarp>(dispatch[0]);
        if (is_fused) {
            std::vector<DispatchCallArgs> fused;
            for (int rank = 0; rank < world; ++rank)
                fused.push_back(fused_args(dispatch[1][rank], notify[rank]));
            grid.launch(kernels::fused_dispatch_kernel<FusedDispatch>,
                        grid.params_of_roles<FusedDispatch>(fused));
        } else if (is_planned) {
            const Waited waited = other_waits(c, gpu);
            dispatch_on(grid, dispatch[1]);
            check_planned(c, gpu, waited, call - 1 + replays);
        } else {
            if (seed % 2) dispatch_too_early(grid, dispatch[1], seed / 2);
            dispatch_on(grid, dispatch[1]);
        }
        for (int rank = 0; rank < world && !is_planned; ++rank)
            expect_equal(rank, "tokens per expert", gpu.counts[rank], host.counts[rank]);
        group.combine<HostWarp>(combine[0], c.dtype);
        const auto combine_joint = grid.params_of_roles<Combine>(combine[1]);
        const bool passes = any_intra_rank_pass(combine[1]);
        const auto combine_now = [&] {
            (weighted ? combine_on<true> : combine_on<false>)(grid, combine_joint, c.dtype, passes);
        };
        if (passes) {  // twice, as a graph replays a call: at first with other rows
            std::mt19937_64 random{seed};
            std::vector<std::string> right;
            for (const Memory& out : expert_out) {
                right.emplace_back(out.data(), out.bytes());
                fill(random, out, c.dtype);
            }
            combine_now();
            ++replays;
            for (int rank = 0; rank < world; ++rank)
                std::copy(right[rank].begin(), right[rank].end(), expert_out[rank].data());
        }
        combine_now();
        check_counted(gpu, is_planned ? 0 : epoch, call + replays);
        if (group.state(0).aborted()) simt::die("the host gave up");
        for (int rank = 0; rank < world; ++rank) expect_same_results(rank, gpu, host);
    }
    grid.check_reset_signals();
}

void run_all_given_up() {
    for (const bool several_nodes : {false, true}) {
        for (const bool in_notify : {false, true}) {
            for (const int tokens : {1, 2, 9, 40}) {
                for (const bool local_pass : {false, true})
                    run_given_up(several_nodes, in_notify, tokens, local_pass);
            }
        }
    }
    for (const bool is_absent : {false, true}) {
        for (const int tokens : {1, 9}) run_fused_given_up(is_absent, tokens);
    }
}

constexpr simt::Named kNamed[] = {
    {"absent",
     [] {
         for (const bool several_nodes : {false, true}) run_given_up(several_nodes, true, 8, false);
     },
     "an absent rank is reported"},
    {"incident",
     [] {
         for (uint64_t seed = 0; seed < 50; ++seed) run_incident(seed);
     },
     "an incident is there before the word"},
    {"waits", run_waits, "waits are counted"},
    {"given_up", run_all_given_up, "what was given up is no data"},
    {"drain",
     [] {
         for (const bool over_network : {false, true}) {
             for (const bool same_size : {false, true}) run_drain(over_network, same_size);
         }
     },
     "a ring runs empty between calls"},
    {"put",
     [] {
         for (uint64_t seed = 0; seed < 20; ++seed) run_puts(seed, 1, 1, 4096);
     },
     "a row is there before its flag"},
#if defined(OVER_QUEUE)
    {"full",
     [] {
         for (uint64_t seed = 0; seed < 4; ++seed) {
             for (const int carried_out : {0, 1, 2}) run_full_queue(seed, carried_out);
         }
     },
     "a full queue is reported"},
    {"turns",
     [] {
         for (uint64_t seed = 0; seed < 20; ++seed) run_puts(seed, 4, 3, 16);
         run_lost_turn();
     },
     "warps that share a queue take turns"},
    {"told", run_told, "what the host has heard ends waits"},
#endif
    {"unfit",
     [] {
         run_unfit(false, false);
         for (const bool has_layout : {false, true}) run_unfit(true, has_layout);
     },
     "an unfit handle is reported"},
};

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    const bool is_planned = argc == 4 && std::string(argv[1]) == "planned";
    return simt::run_program(argc - is_planned, argv + is_planned, ep::kNamed, "cases",
                             [&](uint64_t seed) { ep::run_case(seed, is_planned); });
}
