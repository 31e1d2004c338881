// Random programs of low-latency calls under the seeded scheduler, with a network between nodes
// that delays and reorders, each replayed over the same arguments.
//
//     low_latency_schedules FIRST_SEED END_SEED
//     low_latency_schedules three FIRST_SEED END_SEED     three calls of a kind under way, which
//                                                         must be seen to go wrong
//     low_latency_schedules masks FIRST_SEED END_SEED     with masking: one rank may stop for good
//                                                         or for a while, callers mask others

#include <string>

#include "exec/host/fibers.h"
#include "masked_programs.h"

namespace {

// What went wrong; null: nothing.
const char* run(uint64_t seed, int under_way) {
    ep::SimulatedNetwork network;
    ep::LowLatencyProgram program(seed, &network, under_way, ep::LowLatencyProgram::Sizes::OfWarps,
                                  false, seed % 2);
    std::vector<uint64_t> finished;
    ep::SeededExecutor(seed, &network).run(program.tasks<ep::HostWarp>(3, finished));
    if (program.aborted()) return "aborted";
    return program.errors() ? "wrong values" : nullptr;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc == 4 ? argv[1] : "";
    const bool three = mode == "three", masks = mode == "masks";
    if (argc != 3 && !three && !masks) return 2;
    const uint64_t first = std::strtoull(argv[argc - 2], nullptr, 10),
                   end = std::strtoull(argv[argc - 1], nullptr, 10);
    uint64_t failed = 0;
    int gone = 0;
    for (uint64_t seed = first; seed < end; ++seed) {
        const char* wrong = masks ? ep::run_masked(seed, gone) : run(seed, three ? 3 : 2);
        if (!wrong) continue;
        ++failed;
        if (!three) return std::fprintf(stderr, "seed %lu: %s\n", seed, wrong), 1;
    }
    if (masks) std::printf("%d masks were set; ", gone);
    std::printf("%lu of %lu programs fail\n", failed, end - first);
    return 0;
}
