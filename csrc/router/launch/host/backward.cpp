// clang-format off
#include "router/exec/host/options.h"
// clang-format on

#include <vector>

#include "router/exec/host/host_team.h"
#include "router/launch/host/parallel.h"
#include "router/launch/router.h"
#include "router/row/backward_row.h"

namespace ep {
namespace router {
namespace {

// Of a row its choices alone are read, here and there: without this most of the time is their wait.
template <class Storage>
void fetch_choices(const RouterConfig& config, const RouterBackward& args, int64_t row) {
    const Storage* const logits = static_cast<const Storage*>(args.logits) + row * config.experts;
    const int64_t* const ids = args.ids + row * config.topk;
    for (int k = 0; k < config.topk; ++k) __builtin_prefetch(logits + (ids[k] < 0 ? 0 : ids[k]));
}

template <class Storage>
void backward_rows_of(const RouterConfig& config, const RouterBackward& args, int64_t first,
                      int64_t last) {
    using R = Real<Storage>;
    std::vector<R> scores(config.experts), grads(config.experts), choice_scores(kMaxTopk),
        choice_grads(kMaxTopk);
    std::vector<int32_t> ids(kMaxTopk);
    const BackwardScratch<R> scratch{scores.data(), grads.data(), choice_scores.data(),
                                     choice_grads.data(), ids.data()};
    HostTeam team;
    constexpr int kAhead = 4;  // rows
    for (int64_t row = first; row < last; ++row) {
        if (row + kAhead < last) fetch_choices<Storage>(config, args, row + kAhead);
        backward_row<Storage>(team, config, args, row, scratch);
    }
}

EP_ROUTER_CLONES void backward_rows(const RouterConfig& config, const RouterBackward& args,
                                    int64_t first, int64_t last) {
    with_type(args.dtype, [&]<class T>() { backward_rows_of<T>(config, args, first, last); });
}

}  // namespace
}  // namespace router

void router_backward_host(const RouterConfig& config, const RouterBackward& args, int max_threads) {
    const int threads = router::count_threads(args.tokens, config.experts, max_threads);
    router::in_parallel(args.tokens, config.experts, threads,
                        [&](int, int64_t first, int64_t last) {
                            router::backward_rows(config, args, first, last);
                        });
}

}  // namespace ep
