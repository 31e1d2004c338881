// The low-latency kernels, lane by lane on the host (simt/simt.h): random programs, the ranks'
// halves one launch after the other, replayed over the same arguments.
//
//     low_latency_warp FIRST_SEED END_SEED
//     low_latency_warp absent

#include "simt.h"
// after it
#include "launch/cuda/low_latency_kernels.h"
#include "low_latency_programs.h"
#include "p2p_ranks.h"

namespace ep {
namespace {

class Grid {
  public:
    Grid(LowLatencyProgram& program, uint64_t seed, uint64_t timeout_ns = 60'000'000'000)
        : program_(program), random_(seed), timeout_ns_(timeout_ns) {
        params_.topology = program.topology;
        for (int rank = 0; rank < program.topology.world(); ++rank) {
            params_.heaps[rank] = program.fabrics[rank].own<char>(0);
            abort_words_.push_back(&program.controls[rank].abort);
            waited_.emplace_back(2 * Heap::waited_bytes(program.topology.world()) /
                                 sizeof(uint64_t));
        }
        reports_.resize(program.topology.world());
    }

    template <class Args>
    LowLatencyLaunch<P2pFabricParams, Args> launch_of(const Args& args) {
        return {params_, args, device_rank(args.rank)};
    }

    // A rank's half, by as many blocks as its program has warps.
    void run(int rank, int call, bool receive) {
        using Dispatch = LowLatencyDispatchLaunch<P2pFabricParams>;
        using Combine = LowLatencyCombineLaunch<P2pFabricParams>;
        const auto& part = program_.parts[rank][call];
        if (program_.calls[call].is_combine) {
            const auto launch = launch_of(part.combine);
            run_kernel(receive ? kernels::low_latency_combine_receive_kernel<float, Combine>
                               : kernels::low_latency_combine_send_kernel<float, Combine>,
                       launch);
        } else {
            const auto launch = launch_of(part.dispatch);
            run_kernel(receive ? kernels::low_latency_dispatch_receive_kernel<Dispatch>
                               : kernels::low_latency_dispatch_send_kernel<Dispatch>,
                       launch);
        }
    }

    // Behind a receiving half, as a launch has it.
    void finish(int rank, int call) {
        const auto& part = program_.parts[rank][call];
        FinishJoint<1> joint{};
        joint.blocks_per_rank = kFinishBlocks;
        joint.ranks[0] = device_rank(rank);
        joint.outputs[0] =
            program_.calls[call].is_combine ? outputs_of(part.combine) : outputs_of(part.dispatch);
        simt::run(1, kFinishBlocks, kFinishThreads, random_(),
                  [&] { kernels::finish_kernel(joint); });
        ptx::end_of_launch();
    }

    const ControlBlock& report(int rank) const { return reports_[rank]; }

  private:
    DeviceRank device_rank(int rank) {
        return {rank,
                program_.topology.world(),
                timeout_ns_,
                &program_.controls[rank],
                &reports_[rank],
                abort_words_.data(),
                waited_[rank].data()};
    }

    template <class L>
    void run_kernel(void (*kernel)(L), const L& launch) {
        simt::run(1, program_.warps / kBlockWarps, kBlockThreads, random_(),
                  [&] { kernel(launch); });
        ptx::end_of_launch();
    }

    LowLatencyProgram& program_;
    std::mt19937_64 random_;
    uint64_t timeout_ns_;
    P2pFabricParams params_{};
    std::vector<uint64_t*> abort_words_;
    std::vector<std::vector<uint64_t>> waited_;
    std::vector<ControlBlock> reports_;
};

// Each rank goes as far as it can; one that waits for a launch that has not been made stays behind.
void run_program(uint64_t seed) {
    LowLatencyProgram program(seed, nullptr, 2, LowLatencyProgram::Sizes::OfBlocks);
    Grid grid(program, seed);
    for (int replay = 0; replay < 2; ++replay) {
        for (size_t call = 0; call < program.calls.size(); ++call) {
            for (const bool receive : {false, true}) {
                for (int rank = 0; rank < program.topology.world(); ++rank) {
                    grid.run(rank, call, receive);
                    if (receive) grid.finish(rank, call);
                    if (grid.report(rank).abort) simt::die("a wait ended badly");
                }
            }
        }
        for (const ControlBlock& control : program.controls) {
            const Calls &in = control.entered, &out = control.finished;
            uint64_t calls[2] = {};
            for (const auto& call : program.calls) calls[call.is_combine] += replay + 1;
            for (const int kind : {0, 1}) {
                const bool is_counted =
                    in.sent[kind] == calls[kind] && out.sent[kind] == calls[kind];
                if (!is_counted) simt::die("calls are not counted");
                for (const int bank : {0, 1}) {
                    const uint64_t last = calls[kind] < 2 ? (calls[kind] % 2 == bank) * calls[kind]
                                                          : calls[kind] - (calls[kind] % 2 != bank);
                    if (in.received[kind][bank] != last || out.received[kind][bank] != last)
                        simt::die("receiving halves are not counted");
                }
            }
        }
        if (program.errors()) {
            std::fprintf(stderr, "seed %llu: wrong values\n",
                         static_cast<unsigned long long>(seed));
            std::exit(1);
        }
    }
}

bool is_poison(const Outputs& outputs) {
    for (const Outputs::Part& part : outputs.parts) {
        for (size_t i = 0; i < part.bytes; ++i) {
            if (static_cast<uint8_t>(part.data[i]) != Outputs::kPoison) return false;
        }
    }
    return true;
}

// Rank 0 receives what rank 1 has not sent: all its waits end by one deadline, and say for what;
// and what it wrote is no data.
void run_absent() {
    uint64_t seed = 0;
    const auto fits = [](uint64_t seed) {
        return LowLatencyProgram(seed, nullptr, 2, LowLatencyProgram::Sizes::OfBlocks)
                   .topology.world() == 2;
    };
    while (!fits(seed)) ++seed;
    LowLatencyProgram program(seed, nullptr, 2, LowLatencyProgram::Sizes::OfBlocks);
    Grid grid(program, seed, 50'000'000);
    grid.run(0, 0, false);
    if (grid.report(0).abort) simt::die("a half that asks nobody gave up");
    grid.run(0, 0, true);
    grid.finish(0, 0);
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

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    if (argc == 2 && std::string(argv[1]) == "absent") {
        ep::run_absent();
        std::printf("an absent rank is reported\n");
        return 0;
    }
    if (argc != 3) return 2;
    const uint64_t first = std::strtoull(argv[1], nullptr, 10),
                   end = std::strtoull(argv[2], nullptr, 10);
    for (uint64_t seed = first; seed < end; ++seed) ep::run_program(seed);
    std::printf("%llu programs\n", static_cast<unsigned long long>(end - first));
}
