#pragma once

#include <type_traits>

#include "simt.h"
// after it
#include "launch/cuda/fused_dispatch.h"
#include "normal_programs.h"
#include "program_grid.h"

namespace ep {

constexpr int kMaxRanks = 9;
using Notify = NotifyParams<Ranks::Params, kMaxRanks>;
using Dispatch = DispatchParams<Ranks::Params, kMaxRanks>;
using FusedDispatch = FusedDispatchParams<Ranks::Params, kMaxRanks>;
using Combine = CombineParams<Ranks::Params, kMaxRanks>;

// Launches of kernels for all ranks of a program.
class Grid : public ProgramGrid {
  public:
    Grid(NormalProgram& program, uint64_t seed, uint64_t timeout_ns = 60'000'000'000)
        : ProgramGrid(program, program.heap, std::mt19937_64(seed)(), timeout_ns),
          program_(program),
          progress_(program.topology.world() * Progress::kWords) {}

    template <class L, class Args>
    L params(const std::vector<Args>& args, int warps) {
        L params{};
        params.fabric = fabric().params();
        params.blocks_per_rank = ceil_div(warps, kBlockWarps);
        for (size_t i = 0; i < args.size(); ++i) {
            params.args[i] = args[i];
            params.progress[i] = {&progress_[i * Progress::kWords]};
            params.ranks[i] = device_rank(static_cast<int>(i), waited(static_cast<int>(i)));
            for (int32_t* any :
                 {&args[i].layout.totals().overflow, &args[i].layout.totals().bad_token})
                if (args[i].layout.data) simt::order::ignore(any, sizeof(*any));
        }
        return params;
    }

    // Of a dispatch or combine.
    template <class L, class Args>
    L params_of_roles(const std::vector<Args>& args, int self_warps = 1) {
        const auto [nodes, ranks] = program_.topology;
        const int world = nodes * ranks;
        const decltype(L::roles) roles{nodes, world, even_warps(world - 1, pick(1, world)),
                                       even_warps(nodes - 1, pick(1, nodes)), self_warps};
        L all = params<L>(args, roles.warps() * program_.heap.channels);
        all.roles = roles;
        all.ends_call = true;
        return all;
    }

    template <class L>
    void run(void (*kernel)(L), const L& params, int ranks) {
        simt::run(ranks, params.blocks_per_rank, kBlockThreads, random(), [&] { kernel(params); });
        ptx::end_of_launch();
    }

    template <class L>
    void launch(void (*kernel)(L), const L& params) {
        run(kernel, params, program_.topology.world());
        check_reports();
    }

    // A launch of the intra-rank pass.
    template <class L>
    void launch_spread(void (*kernel)(L), L params) {
        params.blocks_per_rank = pick(1, 2);
        launch(kernel, params);
    }

    // The same with one of the intra-rank pass beside it.
    template <class L>
    void launch_beside(void (*kernel)(L), const L& params, void (*local)(L)) {
        L side = params;
        side.blocks_per_rank = pick(1, 2);
        simt::run_beside(
            program_.topology.world(), params.blocks_per_rank, [&] { kernel(params); },
            side.blocks_per_rank, [&] { local(side); }, kBlockThreads, random());
        ptx::end_of_launch();
        check_reports();
    }

    // How long a rank has waited for each.
    uint64_t* waited(int rank) const {
        return reinterpret_cast<uint64_t*>(program_.heaps[rank] + program_.heap.waited());
    }

  private:
    NormalProgram& program_;
    Tensor<uint64_t> progress_;
};

}  // namespace ep
