#pragma once

#include <cstdlib>

#include "normal_programs.h"
#include "thread_executor.h"

namespace ep {

// Random programs, every warp of every rank a thread.
template <class Warp, class Fabric>
int run_normal(int programs) {
    for (int seed = 0; seed < programs; ++seed) {
        NormalProgram program(seed, nullptr);
        const auto tasks = program.tasks<Warp, Fabric>();
        ThreadExecutor().run(tasks);
        if (program.aborted())
            return std::fprintf(stderr, "program %d: aborted\n", seed), EXIT_FAILURE;
        if (program.errors(tasks))
            return std::fprintf(stderr, "program %d: wrong values\n", seed), EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}

}  // namespace ep
