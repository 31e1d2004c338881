#pragma once

#include <type_traits>

#include "normal_cases.h"

namespace ep {

// The GPU's side of a case: launches of its kernels.
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

    template <class L, class Args>
    L params(const std::vector<Args>& args, int warps) {
        L params{};
        params.fabric = fabric_.params();
        params.blocks_per_rank = ceil_div(warps, kBlockWarps);
        for (size_t i = 0; i < args.size(); ++i) {
            params.args[i] = args[i];
            params.progress[i] = {progress_.as<uint64_t>() + i * Progress::kWords};
            params.ranks[i] = device_rank(i);
        }
        return params;
    }

    // Of a dispatch or combine.
    template <class L, class Args>
    L params_of_roles(const std::vector<Args>& args) {
        const auto roles = this->roles<decltype(L::roles)>();
        L all = params<L>(args, roles.warps() * case_.heap.channels);
        all.roles = roles;
        all.ends_call = true;
        return all;
    }

    // A launch of the intra-rank pass.
    template <class L>
    void launch_spread(void (*kernel)(L), L params) {
        params.blocks_per_rank = case_.pick(1, 2);
        launch(kernel, params);
    }

    template <class L>
    void run(void (*kernel)(L), const L& params, int ranks, unsigned threads = kBlockThreads) {
        simt::run(ranks, params.blocks_per_rank, threads, case_.random(), [&] { kernel(params); });
        ptx::end_of_launch();
    }

    template <class L>
    void launch(void (*kernel)(L), const L& params) {
        run(kernel, params, case_.topology.world());
        check_reports();
    }

    // The same with one of the intra-rank pass beside it.
    template <class L>
    void launch_beside(void (*kernel)(L), const L& params, void (*local)(L)) {
        L side = params;
        side.blocks_per_rank = case_.pick(1, 2);
        simt::run_beside(
            case_.topology.world(), params.blocks_per_rank, [&] { kernel(params); },
            side.blocks_per_rank, [&] { local(side); }, kBlockThreads, case_.random());
        ptx::end_of_launch();
        check_reports();
    }

    void check_reports() const {
        for (const ControlBlock& report : reports_) {
            if (report.abort) simt::die("a wait ended badly");
        }
    }

    const ControlBlock& report(int rank) const { return reports_[rank]; }
    ControlBlock& report(int rank) { return reports_[rank]; }
    Ranks& fabric() { return fabric_; }
    void check_reset_signals() { fabric_.check_reset_signals(case_.random()); }

    template <class Roles>
    Roles roles() const {
        return {case_.topology.nodes, case_.topology.world(), case_.peer_warps, case_.rdma_warps,
                std::is_same_v<Roles, CombineRoles> ? case_.receivers : 1};
    }

  private:
    static std::vector<char*> addresses(const Side& side) {
        std::vector<char*> all;
        for (const Memory& heap : side.heaps) all.push_back(heap.data());
        return all;
    }
    DeviceRank device_rank(size_t rank) {
        return {static_cast<int>(rank), case_.topology.world(), timeout_ns_,  control(rank),
                &reports_[rank],        abort_words_.data(),    waited(rank), Ranks::kOverHost};
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

}  // namespace ep
