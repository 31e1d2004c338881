#pragma once

#include <string>

#include "../tensor.h"
#include "order.h"
#include "simt.h"

namespace simt {

// A run that has a name; what it says when nothing has ended it.
struct Named {
    const char* name;
    void (*run)();
    const char* said;
};

// Runs the one that the only argument names, or run_seed(seed) of all from the first of two
// arguments to the second. Returns the exit status.
template <size_t kCount, class F>
int run_program(int argc, char** argv, const Named (&named)[kCount], const char* unit,
                F&& run_seed) {
    ep::note_memory = [](const void* memory, size_t bytes) {
        bytes ? order::track(memory, bytes, "a tensor") : order::forget(memory);
    };
    for (const Named& one : named) {
        if (argc != 2 || std::string(argv[1]) != one.name) continue;
        one.run();
        return std::puts(one.said), 0;
    }
    if (argc != 3) return 2;
    const uint64_t first = std::strtoull(argv[1], nullptr, 10),
                   end = std::strtoull(argv[2], nullptr, 10);
    for (seed = first; seed < end; ++seed) run_seed(seed);
    std::printf("%lu %s\n", end - first, unit);
    return 0;
}

}  // namespace simt
