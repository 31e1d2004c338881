#pragma once

#include "low_latency_programs.h"
#include "thread_executor.h"

namespace ep {

// Random programs, every warp of every rank a thread.
template <class Warp>
int run_low_latency(int programs) {
    for (int seed = 0; seed < programs; ++seed) {
        LowLatencyProgram program(seed, nullptr, 2, LowLatencyProgram::Sizes::OfWarps, seed % 2,
                                  seed % 4 == 2);
        std::vector<uint64_t> finished;
        ThreadExecutor().run(program.tasks<Warp>(3, finished));
        if (program.aborted())
            return std::fprintf(stderr, "program %d: aborted\n", seed), EXIT_FAILURE;
        if (const int wrong = program.errors() + program.wrong)
            return std::fprintf(stderr, "program %d: %d wrong values\n", seed, wrong), EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}

}  // namespace ep
