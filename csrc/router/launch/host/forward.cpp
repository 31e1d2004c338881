// clang-format off
#include "router/exec/host/options.h"
// clang-format on

#include <vector>

#include "router/exec/host/host_team.h"
#include "router/launch/host/parallel.h"
#include "router/launch/router.h"
#include "router/row/forward_row.h"

namespace ep {
namespace router {
namespace {

template <class Storage>
void forward_rows_of(const RouterConfig& config, const RouterForward& args, int64_t first,
                     int64_t last) {
    using R = Real<Storage>;
    std::vector<R> scores(config.experts), weights(kMaxTopk);
    std::vector<Key<R>> keys(config.experts), group_keys(config.groups);
    std::vector<int32_t> ids(kMaxTopk);
    const ForwardScratch<R> scratch{scores.data(), keys.data(), group_keys.data(), weights.data(),
                                    ids.data()};
    HostTeam team;
    for (int64_t row = first; row < last; ++row)
        forward_row<Storage>(team, config, args, row, scratch);
}

EP_ROUTER_CLONES void forward_rows(const RouterConfig& config, const RouterForward& args,
                                   int64_t first, int64_t last) {
    with_type(args.dtype, [&]<class T>() { forward_rows_of<T>(config, args, first, last); });
}

}  // namespace
}  // namespace router

void router_forward_host(const RouterConfig& config, const RouterForward& args, int max_threads) {
    const int threads = router::count_threads(args.tokens, config.experts, max_threads);
    std::vector<std::vector<int64_t>> counts(threads, std::vector<int64_t>(config.experts));
    router::in_parallel(args.tokens, config.experts, threads,
                        [&](int thread, int64_t first, int64_t last) {
                            RouterForward own = args;
                            own.tokens_per_expert = counts[thread].data();
                            router::forward_rows(config, own, first, last);
                        });
    for (int e = 0; e < config.experts; ++e) {
        args.tokens_per_expert[e] = 0;
        for (const auto& own : counts) args.tokens_per_expert[e] += own[e];
    }
}

}  // namespace ep
