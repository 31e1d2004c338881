// The router on the host: rows are divided among threads.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <thread>
#else
#include <omp.h>
#endif

#include "router/host_team.h"
#include "router/router.h"
#include "router/rows.h"

namespace ep {
namespace router {
namespace {

// Rows times experts below which more threads cost more than they save: about 100 us of work.
constexpr int64_t kMinElements = 1 << 17;
// Elements that a thread takes at once: much fewer, so that one that gets to run late does little.
constexpr int64_t kElementsAtOnce = 1 << 13;

// A forked process has none of OpenMP's threads, and OpenMP would wait for them.
const pid_t loaded_by = getpid();

// All threads or one: OpenMP ends the threads that a smaller team leaves out, and torch's next
// operator would have to start them again.
int count_threads(int64_t rows, int experts, int max_threads) {
    return rows * experts < kMinElements || getpid() != loaded_by ? 1 : max_threads;
}

// Calls f(thread, first, last) for pieces of [0, rows), on whichever thread is free. They are the
// threads of torch's operators: idle ones keep their cores for a while, and others would wait for
// them.
template <class F>
void in_parallel(int64_t rows, int experts, int threads, F f) {
    const int64_t at_once = std::max<int64_t>(1, kElementsAtOnce / experts);
    std::atomic<int64_t> taken = 0;
    auto work = [&](int thread) {
        int64_t first;
        while ((first = taken.fetch_add(at_once, std::memory_order_relaxed)) < rows)
            f(thread, first, std::min(first + at_once, rows));
    };
#if defined(__SANITIZE_THREAD__)  // TSan does not see how OpenMP's threads wait for each other
    std::vector<std::jthread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
    work(0);
#else
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
#endif
}

template <class Storage>
void forward_rows_of(const RouterConfig& config, const RouterForward& args, int64_t first,
                     int64_t last) {
    using Scratch = ForwardScratch<Real<Storage>>;
    std::vector<unsigned char> memory(scratch_bytes<Scratch>(config));
    ScratchArrays arrays(memory.data());
    const Scratch scratch = Scratch::in(arrays, config);
    HostTeam team;
    for (int64_t row = first; row < last; ++row)
        forward_row<Storage>(team, config, args, row, scratch);
}

void forward_rows(const RouterConfig& config, const RouterForward& args, int64_t first,
                  int64_t last) {
    with_type(args.dtype, [&]<class T>() { forward_rows_of<T>(config, args, first, last); });
}

// Prefetches a row's choices: most of the time would be spent waiting for these scattered loads.
template <class Storage>
void fetch_choices(const RouterConfig& config, const RouterBackward& args, int64_t row) {
    const Storage* const logits = static_cast<const Storage*>(args.logits) + row * config.experts;
    const int64_t* const ids = args.ids + row * config.topk;
    for (int k = 0; k < config.topk; ++k) __builtin_prefetch(logits + (ids[k] < 0 ? 0 : ids[k]));
}

template <class Storage>
void backward_rows_of(const RouterConfig& config, const RouterBackward& args, int64_t first,
                      int64_t last) {
    using Scratch = BackwardScratch<Real<Storage>>;
    std::vector<unsigned char> memory(scratch_bytes<Scratch>(config));
    ScratchArrays arrays(memory.data());
    const Scratch scratch = Scratch::in(arrays, config);
    HostTeam team;
    constexpr int kAhead = 4;  // rows
    for (int64_t row = first; row < last; ++row) {
        if (row + kAhead < last) fetch_choices<Storage>(config, args, row + kAhead);
        backward_row<Storage>(team, config, args, row, scratch);
    }
}

void backward_rows(const RouterConfig& config, const RouterBackward& args, int64_t first,
                   int64_t last) {
    with_type(args.dtype, [&]<class T>() { backward_rows_of<T>(config, args, first, last); });
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

void router_backward_host(const RouterConfig& config, const RouterBackward& args, int max_threads) {
    const int threads = router::count_threads(args.tokens, config.experts, max_threads);
    router::in_parallel(args.tokens, config.experts, threads,
                        [&](int, int64_t first, int64_t last) {
                            router::backward_rows(config, args, first, last);
                        });
}

}  // namespace ep
