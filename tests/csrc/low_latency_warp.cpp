// The low-latency kernels, lane by lane on the host (simt/simt.h): random programs, replayed over
// the same arguments. Halves of any ranks are launched at the same time, unless one of them could
// only wait for a launch that has not been made.
//
//     low_latency_warp FIRST_SEED END_SEED
//     low_latency_warp absent
//     low_latency_warp unfit
//     low_latency_warp ids
//     low_latency_warp masked
//     low_latency_warp arrive
//
// Between the ranks lies the p2p fabric, or with OVER_NCCL or OVER_NVSHMEM that of NCCL or NVSHMEM.

#include "simt.h"
// after it
#include <array>
#include <ranges>

#include "launch/cuda/low_latency_kernels.h"
#include "low_latency_programs.h"
#include "program_grid.h"
#include "programs.h"

namespace ep {
namespace {

class Grid : public ProgramGrid {
  public:
    Grid(LowLatencyProgram& program, uint64_t seed, uint64_t timeout_ns = 60'000'000'000)
        : ProgramGrid(program, program.heap, seed, timeout_ns),
          program_(program),
          waited_(program.topology.world(),
                  std::vector<uint64_t>(2 * Heap::waited_bytes(program.topology.world()) /
                                        sizeof(uint64_t))) {}

    template <class Args>
    LowLatencyLaunch<Ranks::Params, Args> launch_of(const Args& args) {
        return {fabric().params(), args, device_rank(args.rank, waited_[args.rank].data())};
    }

    // These halves, each with the rank whose it is, by as many blocks as the program has warps.
    using Halves = std::vector<std::pair<int, LowLatencyProgram::Half>>;
    void run(const Halves& halves) {
        std::vector<std::function<void()>> kernels;
        for (const auto& [rank, half] : halves) kernels.push_back(kernel_of(rank, half));
        fabric().begin_launch();
        simt::run_at_once(kernels, program_.warps / kBlockWarps, kBlockThreads, random());
        ptx::end_of_launch();
    }

    std::function<void()> kernel_of(int rank, const LowLatencyProgram::Half& half) {
        using Dispatch = LowLatencyDispatchLaunch<Ranks::Params>;
        using Combine = LowLatencyCombineLaunch<Ranks::Params>;
        const auto& part = program_.parts[rank][half.call];
        const auto launched = [](auto kernel, const auto& launch) {
            return [=] { kernel(launch); };
        };
        const auto kernel = [&]<LowLatencyLaunches kLaunches>() -> std::function<void()> {
            const bool is_combine = program_.calls[half.call].is_combine;
            const auto of_call = [&]<bool kLines>() -> std::function<void()> {
                using kernels::low_latency_combine_kernel;
                if (is_combine)
                    return launched(low_latency_combine_kernel<kLaunches, float, kLines, Combine>,
                                    launch_of(part.combine));
                return launched(kernels::low_latency_dispatch_of<kLaunches, kLines, Dispatch>(
                                    part.dispatch.row_kind()),
                                launch_of(part.dispatch));
            };
            if constexpr (Ranks::Params::Fabric::kKeepsLines) {
                const bool lines = is_combine ? part.combine.by_lines() : program_.heap.lines;
                if (lines) return of_call.template operator()<true>();
            }
            return of_call.template operator()<false>();
        };
        if (!half.sends) return kernel.operator()<LowLatencyLaunches::Receive>();
        return half.receives ? kernel.operator()<LowLatencyLaunches::Both>()
                             : kernel.operator()<LowLatencyLaunches::Send>();
    }

  private:
    LowLatencyProgram& program_;
    std::vector<std::vector<uint64_t>> waited_;
};

constexpr uint64_t kBefore = 50;  // calls of other heaps

// One replay of a program: launch after launch some ranks, by chance, run their next half.
void run_halves(LowLatencyProgram& program, Grid& grid, std::mt19937_64& random) {
    const int world = program.topology.world();
    using Half = LowLatencyProgram::Half;
    std::vector<size_t> next(world);
    std::vector<std::array<std::vector<bool>, 2>> launched(world);  // [rank][receive][call]
    for (auto& own : launched) own.fill(std::vector<bool>(program.calls.size()));
    // the call before in the same bank, and the dispatch whose choices may release that one, of
    // this replay or the last
    std::vector<int> previous(program.calls.size(), -1), releasing = previous;
    std::vector<int> of_kind[2];
    for (size_t call = 0; call < program.calls.size(); ++call) {
        std::vector<int>& before = of_kind[program.calls[call].is_combine];
        if (before.size() >= LowLatencyHeap::kBanks)
            previous[call] = before[before.size() - LowLatencyHeap::kBanks];
        if (!before.empty() && !program.calls[call].is_combine) releasing[call] = before.back();
        before.push_back(static_cast<int>(call));
    }
    const auto is_done = [&](int rank) { return next[rank] == program.halves[rank].size(); };
    const auto next_half = [&](int rank) -> const Half& {
        return program.halves[rank][next[rank]];
    };
    for (;;) {
        std::vector<int> chosen;
        for (int rank = 0; rank < world; ++rank) {
            if (!is_done(rank) && random() % 3) chosen.push_back(rank);
        }
        // Of all ranks: what they send of this call, or that they are done with its bank and say
        // so.
        const auto waits_in_vain = [&](const std::vector<int>& at_once, int rank) {
            const auto lacks = [&](int call, bool receive) {
                if (call < 0) return false;
                return std::ranges::any_of(std::views::iota(0, world), [&](int other) {
                    if (launched[other][receive][call]) return false;
                    const Half& theirs = next_half(other);
                    return std::ranges::find(at_once, other) == at_once.end() ||
                           theirs.call != call || !(receive ? theirs.receives : theirs.sends);
                });
            };
            const Half& half = next_half(rank);
            return (half.sends &&
                    (lacks(previous[half.call], true) || lacks(releasing[half.call], false))) ||
                   (half.receives && lacks(half.call, false));
        };
        std::vector<int> at_once;
        do {
            at_once = chosen;
            std::erase_if(chosen, [&](int rank) { return waits_in_vain(at_once, rank); });
        } while (chosen.size() != at_once.size());
        if (chosen.empty()) {
            if (std::ranges::all_of(std::views::iota(0, world), is_done)) return;
            continue;
        }
        Grid::Halves halves;
        for (const int rank : chosen) halves.emplace_back(rank, next_half(rank));
        grid.run(halves);
        for (const auto& [rank, half] : halves) {
            if (half.sends) launched[rank][0][half.call] = true;
            if (half.receives) launched[rank][1][half.call] = true;
            program.end_launch(rank, next[rank]++);
        }
        grid.check_reports();
    }
}

// Every rank has counted its calls, as it goes on to do where other heaps' calls came before: a
// receiving half has the number of its call among those that were sent.
void check_counted(const LowLatencyProgram& program, int replays_before) {
    uint64_t of_kind[2] = {}, all = program.calls.size();
    std::vector<uint64_t> number;
    for (const auto& call : program.calls) number.push_back(++of_kind[call.is_combine]);
    for (int rank = 0; rank < program.topology.world(); ++rank) {
        const ControlBlock& control = program.controls[rank];
        if (program.heap.sums_at_expert) {  // as calls in one hop, which are received one by one
            if (control.finished.transfer != kBefore + all * (replays_before + 1))
                simt::die("calls in one hop are not counted");
            continue;
        }
        for (const bool is_combine : {false, true}) {
            const auto kind = is_combine ? LowLatencyKind::Combine : LowLatencyKind::Dispatch;
            uint64_t last = 0;
            for (const auto& half : program.halves[rank]) {
                if (half.receives && program.calls[half.call].is_combine == is_combine)
                    last = number[half.call];
            }
            if (!last) continue;
            const uint64_t before = kBefore + of_kind[is_combine] * replays_before;
            for (const Calls& calls : {control.entered, control.finished}) {
                if (calls.*counter_of(kind, LowLatencyHalf::Send) != before + of_kind[is_combine])
                    simt::die("calls are not counted");
                if (calls.*counter_of(kind, LowLatencyHalf::Receive) != before + last)
                    simt::die("receiving halves are not counted");
            }
        }
    }
}

void run_program(uint64_t seed) {
    const bool lines = seed % 4 == 0 && Ranks::Params::Fabric::kKeepsLines;
    LowLatencyProgram program(seed, nullptr, 2, LowLatencyProgram::Sizes::OfBlocks, seed % 2,
                              lines);
    Grid grid(program, seed);
    for (ControlBlock& control : program.controls)
        control.entered = control.finished = {0, kBefore, kBefore, kBefore, kBefore, kBefore};
    std::mt19937_64 random(~seed);
    for (int replay = 0; replay < 2; ++replay) {
        run_halves(program, grid, random);
        check_counted(program, replay);
        if (program.errors() || program.wrong) simt::die("wrong values");
    }
    grid.check_reset_signals();
}

bool is_poison(const Outputs& outputs) {
    for (const Outputs::Part& part : outputs.parts) {
        for (size_t i = 0; i < part.bytes; ++i) {
            if (static_cast<uint8_t>(part.data[i]) != Outputs::kPoison) return false;
        }
    }
    return true;
}

uint64_t seed_of_ranks(int world) {
    const auto fits = [world](uint64_t seed) {
        return LowLatencyProgram(seed, nullptr, 2, LowLatencyProgram::Sizes::OfBlocks)
                   .topology.world() == world;
    };
    uint64_t seed = 0;
    while (!fits(seed)) ++seed;
    return seed;
}

struct MaskedRanks {
    uint64_t seed;
    LowLatencyProgram program{seed, nullptr, 2, LowLatencyProgram::Sizes::OfBlocks, true};
    Grid grid{program, seed, 10'000'000'000};

    explicit MaskedRanks(int world) : seed(seed_of_ranks(world)) {
        for (auto& parts : program.parts) parts[0].dispatch.mask.slice_ns = 5'000'000;
    }
    void run(int rank) {
        grid.run({{rank, {0, true, false}}});
        grid.run({{rank, {0, false, true}}});
    }
    // That it goes on without the other.
    void check_alone(int rank) const {
        if (grid.report(rank).abort) simt::die("a call was given up");
        if (program.active[rank] != std::vector<int32_t>{rank == 0, rank == 1})
            simt::die("the other rank was not masked");
        if (program.dispatch_errors(rank, 0)) simt::die("wrong values");
    }
    // That it ends, because another goes on without it, and that one does not.
    void check_cut_off(int rank, int by) const {
        const uint64_t word = ControlBlock::abort_word(Outcome::CutOff, rank);
        if (grid.report(rank).abort != word || program.controls[rank].abort != word)
            simt::die("a rank goes on that another has taken for dead");
        const Incident& incident = grid.report(rank).incidents[0];
        if (incident.outcome != Outcome::CutOff || incident.peer != by)
            simt::die("a rank does not know who has taken it for dead");
        if (program.controls[by].abort) simt::die("a rank that was masked ended others");
        if (!is_poison(outputs_of(program.parts[rank][0].dispatch)))
            simt::die("what a rank that was masked left looks like data");
    }
};

// The same with masking: rank 0 receives what there is, and rank 1 ends, when it comes at last.
void run_masked() {
    MaskedRanks two(2);
    two.run(0);
    two.check_alone(0);
    const MaskedRank& shown = two.program.shown[0][1];
    if (shown.state != MaskedRank::kWaited + static_cast<uint64_t>(Wait::Choices) ||
        shown.waited_ns < 20'000'000)
        simt::die("the host is not told for what a rank waited, and how long");
    two.run(1);
    two.check_cut_off(1, 0);
    if (two.program.shown[1][0].state) simt::die("a rank that was masked has masked another");
}

// Rank 1 was first to take rank 0 for dead, which has not heard of it yet; rank 2 must not end,
// too.
void run_beaten() {
    MaskedRanks ranks(3);
    auto claim = [&](int rank) -> uint64_t& {
        return *ranks.program.fabrics[0].own<uint64_t>(ranks.program.heap.first_to_mask(rank));
    };
    claim(1) = 2;
    ranks.run(0);
    ranks.check_cut_off(0, 1);
    if (claim(1) != 2 || claim(2)) simt::die("a rank that was masked claims others");
}

// Rank 0 has masked rank 1 already when it hears that rank 1 has taken it for dead: over a network
// both may do so at once.
void run_told() {
    MaskedRanks two(2);
    const LowLatencyHeap& heap = two.program.heap;
    *two.program.fabrics[0].own<uint64_t>(heap.masked(1)) = 1;
    *two.program.fabrics[0].own<uint64_t>(heap.masked_flag(1)) =
        static_cast<uint64_t>(MaskReason::Silent);
    two.run(0);
    two.check_cut_off(0, 1);
}

// A caller left a rank out: both go on, each without the other.
void run_asked() {
    MaskedRanks two(2);
    two.program.active[0][1] = 0;
    for (const int rank : {0, 1}) {
        two.run(rank);
        two.check_alone(rank);
        if (two.program.shown[rank][1 - rank].state != MaskedRank::kAsked)
            simt::die("the host is not told that a caller left a rank out");
    }
}

// Rank 0 receives what rank 1 has not sent: all its waits end by one deadline, and say for what;
// and what it wrote is no data.
void run_absent() {
    const uint64_t seed = seed_of_ranks(2);
    LowLatencyProgram program(seed, nullptr, 2, LowLatencyProgram::Sizes::OfBlocks);
    Grid grid(program, seed, 50'000'000);
    grid.run({{0, {0, true, false}}});
    if (grid.report(0).abort) simt::die("a half that asks nobody gave up");
    grid.run({{0, {0, false, true}}});
    if (!is_poison(outputs_of(program.parts[0][0].dispatch)))
        simt::die("what a call that was given up left looks like data");
    const Incident& incident = grid.report(0).incidents[0];
    const bool named = incident.outcome == Outcome::Timeout &&
                       incident.role == Role::LowLatencyReceiver &&
                       incident.wait == Wait::Choices && incident.rank == 0 && incident.peer == 1 &&
                       incident.seen == 0 && incident.expected == 1 && incident.call == 1;
    if (!named) simt::die("the wait for an absent rank is not reported as it was");
    for (const ControlBlock& control : program.controls) {
        if (control.abort != ControlBlock::abort_word(Outcome::Timeout, 0))
            simt::die("a rank is not told that another gave up");
    }
}

// Both halves of the first dispatch of two ranks; every second one by lines if the fabric keeps
// them.
struct TwoRanks {
    LowLatencyProgram program;
    Grid grid;

    explicit TwoRanks(uint64_t order)
        : program(seed_of_ranks(2), nullptr, 2, LowLatencyProgram::Sizes::OfBlocks, false,
                  order % 2 && Ranks::Params::Fabric::kKeepsLines),
          grid(program, order, 10'000'000'000) {}
    LowLatencyProgram::Part& part(int rank) { return program.parts[rank][0]; }
    void run() { grid.run({{0, {0, true, true}}, {1, {0, true, true}}}); }
    void check_ended(Outcome outcome) {
        for (const ControlBlock& control : program.controls) {
            if (control.abort != ControlBlock::abort_word(outcome, 0))
                simt::die("a rank is not told that another gave up, and why");
        }
        const Incident& incident = grid.report(0).incidents[0];
        if (incident.outcome != outcome || incident.rank != 0)
            simt::die("what a rank gave up for is not reported");
        if (!is_poison(outputs_of(part(0).dispatch)))
            simt::die("what a call that was given up left looks like data");
    }
};

// Rank 0's call uses the layout of a dispatch that was given up.
void run_unfit(uint64_t order) {
    TwoRanks two(order);
    uint64_t of_ranks[] = {LowLatencyArgs::kGivenUp, 7};
    for (const int rank : {0, 1}) two.part(rank).dispatch.layout_call = &of_ranks[rank];
    two.run();
    two.check_ended(Outcome::NoLayout);
}

// An id of rank 0's last token is invalid, which ends the call, whichever warp comes first.
void run_invalid_ids(uint64_t order) {
    TwoRanks two(order);
    if (two.part(0).ids.size() == 0) simt::die("no token has an id");
    two.part(0).ids[two.part(0).ids.size() - 1] = two.program.experts;
    two.run();
    two.check_ended(Outcome::BadInput);
}

// Each warp writes a row, by the copy engine, and arrives: the last one can read all of them.
void run_arrive(uint64_t seed) {
    constexpr size_t kBytes = 4096;
    constexpr int kWarps = 4;
    Tensor<uint4> row(kBytes / sizeof(uint4), uint4{1, 2, 3, 4}), rows(kWarps * row.size());
    uint64_t counter = 0;
    ControlBlock control{}, report{};
    const DeviceRank rank{0, 1, 1'000'000'000, &control, &report, nullptr, nullptr};
    int last = 0;
    simt::run(1, 1, 32 * kWarps, seed, [&] {
        const int number = static_cast<int>(threadIdx.x / 32);
        DeviceWarp warp(rank, 1, Role::Launch, number, kernels::bulk_buffers());
        warp.copy<CacheHint::Keep>(rows.data() + number * row.size(), row.data(), kBytes);
        if (warp.arrive<Scope::Rank>(&counter) != kWarps - 1) return;
        warp.lanes(32, [&](int lane) {
            for (size_t i = lane; i < rows.size(); i += 32) {
                if (rows[i].w != 4) simt::die("a warp has arrived before its row");
            }
            last += lane == 0;
        });
    });
    ptx::end_of_launch();
    if (last != 1) simt::die("not one warp is the last");
}

constexpr simt::Named kNamed[] = {
    {"absent", run_absent, "an absent rank is reported"},
    {"unfit",
     [] {
         for (uint64_t order = 0; order < 4; ++order) run_unfit(order);
     },
     "an unfit handle is reported"},
    {"ids",
     [] {
         for (uint64_t order = 0; order < 40; ++order) run_invalid_ids(order);
     },
     "invalid ids are reported"},
    {"masked",
     [] {
         run_masked();
         run_beaten();
         run_told();
         run_asked();
     },
     "an absent rank is masked"},
    {"arrive",
     [] {
         for (uint64_t seed = 0; seed < 20; ++seed) run_arrive(seed);
     },
     "the last to arrive sees all"},
};

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    return simt::run_program(argc, argv, ep::kNamed, "programs", ep::run_program);
}
