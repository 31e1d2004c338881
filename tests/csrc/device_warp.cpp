// The CUDA kernels, lane by lane on the host (simt/simt.h): for random programs they must give the
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
// Between the ranks lies the p2p fabric, or with OVER_NCCL, OVER_NVSHMEM or OVER_QUEUE another.

#include "normal_failures.h"
// after it
#include "programs.h"

namespace ep {
namespace {

template <class Args>
bool any_intra_rank_pass(const std::vector<Args>& args) {
    return std::ranges::any_of(args, [](const Args& a) { return has_intra_rank_pass(a); });
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

// A program on GPUs, launch after launch.
class Launches {
  public:
    Launches(NormalProgram& program, uint64_t seed) : program_(program), grid_(program, seed) {
        for (size_t call = 0; call < program.calls.size(); ++call) {
            switch (program.calls[call].kind) {
                case NormalProgram::Kind::Notify:
                    if (is_fused(call))
                        fused_dispatch(call++);
                    else
                        notify(call);
                    break;
                case NormalProgram::Kind::Dispatch:
                    dispatch(call);
                    break;
                case NormalProgram::Kind::Combine:
                    combine(call);
            }
            check_counted();
        }
        grid_.check_reset_signals();
    }

  private:
    // f(rank) of each rank.
    template <class F>
    auto of_ranks(F&& f) const {
        std::vector<std::decay_t<decltype(f(0))>> all;
        for (int rank = 0; rank < program_.topology.world(); ++rank) all.push_back(f(rank));
        return all;
    }
    const NotifyArgs& notify_of(size_t call, int rank) const {
        return program_.handles[program_.calls[call].handle].shares[rank].notify;
    }

    void notify(size_t call) {
        const int blocks = std::min(grid_.pick(1, 4), 2);  // which meet
        const int warps = std::max(blocks * kBlockWarps, program_.heap.channels + 1);
        const auto args = of_ranks([&](int rank) { return notify_of(call, rank); });
        grid_.launch(kernels::notify_kernel<Notify>, grid_.params<Notify>(args, warps));
        ++notifies_;
    }

    // Whether the dispatch behind a notify does what the notify would do.
    bool is_fused(size_t call) {
        return call + 1 < program_.calls.size() && program_.calls[call + 1].fills_tables &&
               program_.calls[call + 1].handle == program_.calls[call].handle &&
               program_.topology.nodes == 1 && program_.topology.world() > 1 && grid_.pick(0, 1);
    }
    void fused_dispatch(size_t call) {
        const auto args = of_ranks([&](int rank) {
            DispatchArgs dispatch = program_.parts[call + 1][rank].dispatch;
            dispatch.has_intra_rank_pass = false;
            return DispatchCallArgs{dispatch, notify_of(call, rank)};
        });
        grid_.launch(kernels::fused_dispatch_kernel<FusedDispatch>,
                     grid_.params_of_roles<FusedDispatch>(args));
        ++notifies_;
        ++transfers_;
    }

    void dispatch(size_t call) {
        auto args = of_ranks([&](int rank) { return program_.parts[call][rank].dispatch; });
        const bool is_planned = args[0].layout.is_planned;
        const auto waited = other_waits();
        if (args[0].fills_tables && !is_planned && grid_.pick(0, 1))
            dispatch_too_early(grid_, args, grid_.pick(0, 3));
        dispatch_on(grid_, args);
        ++transfers_;
        if (is_planned) check_planned(waited);
    }

    void combine(size_t call) {
        std::vector<NormalProgram::Part>& parts = program_.parts[call];
        const NormalProgram::Call& of = program_.calls[call];
        const auto args = of_ranks([&](int rank) { return parts[rank].combine; });
        const auto params = grid_.params_of_roles<Combine>(args, parts[0].receivers);
        const bool passes = any_intra_rank_pass(args);
        const auto reverse = [&] {
            for (NormalProgram::Part& part : parts) std::ranges::reverse(part.x);
        };
        const auto run = [&] {
            (of.weighted ? combine_on<true> : combine_on<false>)(grid_, params, of.dtype, passes);
            ++transfers_;
        };
        if (passes) {  // twice, as a graph replays a call: at first with other rows
            reverse();
            run();
            reverse();
        }
        run();
    }

    // How long each rank has waited for each, made other numbers than when the last call began.
    std::vector<std::vector<uint64_t>> other_waits() const {
        return of_ranks([&](int rank) {
            std::vector<uint64_t> waited;
            for (int other = 0; other < program_.topology.world(); ++other)
                waited.push_back(++grid_.waited(rank)[other]);
            return waited;
        });
    }
    // No notify begins a call by a plan: its dispatch notes what was waited before, and says what
    // it is.
    void check_planned(const std::vector<std::vector<uint64_t>>& waited) const {
        for (const RankState& state : program_.states) {
            const auto& own = waited[state.rank];
            const char* before = program_.heaps[state.rank] + program_.heap.waited_before();
            if (std::memcmp(before, own.data(), own.size() * sizeof(uint64_t)) != 0)
                simt::die("a call by a plan does not begin");
            const uint64_t word = state.control->sends_in(Sends::Mode::Transfer, transfers_);
            if (Sends::of(word).kind != Sends::Kind::PlannedDispatch)
                simt::die("a call by a plan does not say that it is one");
        }
    }
    void check_counted() const {
        for (const RankState& state : program_.states) {
            for (const Calls& calls : {state.control->entered, state.control->finished}) {
                if (calls.notify != notifies_ || calls.transfer != transfers_)
                    simt::die("calls are not counted");
            }
        }
    }

    NormalProgram& program_;
    Grid grid_;
    uint64_t notifies_ = 0, transfers_ = 0;
};

template <class T>
void expect_equal(const std::string& what, const Tensor<T>& ours, const Tensor<T>& expected) {
    if (ours == expected) return;
    const auto at = std::ranges::mismatch(ours, expected).in1 - ours.begin();
    const std::string text =
        what + " differs at " + std::to_string(at) + " of " + std::to_string(expected.size());
    simt::die(text.c_str());
}

void run_program(uint64_t seed) {
    const auto program = [&](SimulatedNetwork* network) {
        return NormalProgram(seed, network, {3, 3}, NormalProgram::Sizes::OfBlocks);
    };
    SimulatedNetwork network;
    NormalProgram host = program(&network), gpu = program(nullptr);
    SeededExecutor(seed, &network).run(host.tasks<HostWarp, HostFabric>());
    if (host.aborted()) simt::die("the host gave up");
    const Launches launches(gpu, seed);
    for (int rank = 0; rank < gpu.topology.world(); ++rank) {
        const std::string of_rank = " of rank " + std::to_string(rank);
        for (size_t handle = 0; handle < gpu.handles.size(); ++handle) {
            const auto &ours = gpu.handles[handle].shares[rank],
                       &expected = host.handles[handle].shares[rank];
            const std::string of = of_rank + ", handle " + std::to_string(handle);
            expect_equal("layout" + of, ours.layout, expected.layout);
            expect_equal("tokens per expert" + of, ours.counts, expected.counts);
            expect_equal("dst_rows" + of, ours.dst_rows, expected.dst_rows);
            expect_equal("rail experts" + of, ours.rail, expected.rail);
            expect_equal("source tokens" + of, ours.source_tokens, expected.source_tokens);
        }
        for (size_t call = 0; call < gpu.calls.size(); ++call) {
            const auto &ours = gpu.parts[call][rank], &expected = host.parts[call][rank];
            const std::string of = of_rank + ", call " + std::to_string(call);
            expect_equal("x or y" + of, ours.out, expected.out);
            expect_equal("scales" + of, ours.out_scales, expected.out_scales);
            expect_equal("weights" + of, ours.out_weights, expected.out_weights);
        }
    }
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
    return simt::run_program(argc, argv, ep::kNamed, "programs", ep::run_program);
}
