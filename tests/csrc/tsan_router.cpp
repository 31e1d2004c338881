// The router's threads under ThreadSanitizer: rows in parts, counts of every part added up. Results
// must not depend on the number of threads.

#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "router_cases.h"

int main() {
    const ep::RouterConfig config{96, 6, 8, 3, ep::ScoreFunction::Sigmoid, true, 2.5};
    constexpr int64_t kTokens = 8200;  // enough work for 12 threads
    const ep::RouterInputs<float> in(config, kTokens, 1, false);
    const auto run = [&](int threads) {
        ep::RouterResults<float> out(kTokens, config);
        ep::router_forward_host(config, ep::forward_of(config, in, out), threads);
        ep::router_backward_host(config, ep::backward_of(in, out, true), threads);
        return out;
    };
    const auto alone = run(1);
    const int64_t choices = std::accumulate(alone.counts.begin(), alone.counts.end(), int64_t{0});
    if (choices != (kTokens - kTokens / 3) * config.topk)
        return std::printf("%ld choices were counted\n", choices), EXIT_FAILURE;
    for (const int threads : {2, 4, 12}) {
        if (run(threads) != alone)
            return std::printf("%d threads give another result than one\n", threads), EXIT_FAILURE;
    }
}
