// The router's code for a CUDA warp, its 32 lanes as threads: results must be the host's, and
// ThreadSanitizer must find every exchange through shared or global memory ordered by a __syncwarp
// or a shuffle.

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

// ---- what WarpTeam takes from CUDA

#define __device__

namespace {

constexpr int kLanes = 32;
thread_local int this_lane;
std::barrier<> warp_barrier(kLanes);

void __syncwarp() { warp_barrier.arrive_and_wait(); }

template <class T, class F>
auto exchange(T value, F read) {
    static std::array<T, kLanes> values;
    values[this_lane] = value;
    warp_barrier.arrive_and_wait();
    const auto result = read(values);
    warp_barrier.arrive_and_wait();
    return result;
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    return exchange(value, [=](const auto& values) { return values[this_lane ^ distance]; });
}
int __reduce_max_sync(unsigned, int value) {
    return exchange(
        value, [](const auto& values) { return *std::max_element(values.begin(), values.end()); });
}
int __reduce_min_sync(unsigned, int value) {
    return exchange(
        value, [](const auto& values) { return *std::min_element(values.begin(), values.end()); });
}
int __reduce_add_sync(unsigned, int value) {
    return exchange(value, [](const auto& values) {
        int sum = 0;
        for (int v : values) sum += v;
        return sum;
    });
}
void atomicAdd(unsigned long long* counter, unsigned long long value) {
    __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
}

}  // namespace

#include "router/router.h"
#include "router/rows.h"
#include "router/warp_team.h"

namespace {

using ep::router::Key;

template <class R>
struct Results {
    std::vector<int64_t> ids, counts;
    std::vector<R> weights, probs, aux_scores, grad;
    std::vector<char> routing_map, aux_map;

    Results(int64_t tokens, const ep::RouterConfig& config)
        : ids(tokens * config.topk),
          counts(config.experts),
          weights(ids.size()),
          probs(tokens * config.experts),
          aux_scores(probs.size()),
          grad(probs.size()),
          routing_map(probs.size()),
          aux_map(probs.size()) {}
};

template <class R>
struct Inputs {
    int64_t tokens;
    std::vector<R> logits;
    std::vector<float> bias;
    std::vector<char> padding;
};

template <class R>
ep::RouterForward forward_of(const ep::RouterConfig& config, const Inputs<R>& in, Results<R>& out) {
    ep::RouterForward args{};
    args.tokens = in.tokens;
    args.dtype = std::is_same_v<R, float> ? ep::DType::fp32 : ep::DType::fp64;
    args.logits = in.logits.data();
    args.bias = config.score == ep::ScoreFunction::Sigmoid ? in.bias.data() : nullptr;
    args.padding = reinterpret_cast<const bool*>(in.padding.data());
    args.ids = out.ids.data();
    args.weights = out.weights.data();
    args.tokens_per_expert = out.counts.data();
    args.probs = out.probs.data();
    args.routing_map = reinterpret_cast<bool*>(out.routing_map.data());
    args.aux_scores = out.aux_scores.data();
    args.aux_map = reinterpret_cast<bool*>(out.aux_map.data());
    return args;
}

template <class R>
ep::RouterBackward backward_of(const Inputs<R>& in, Results<R>& out, bool with_aux) {
    ep::RouterBackward args{};
    args.tokens = in.tokens;
    args.dtype = std::is_same_v<R, float> ? ep::DType::fp32 : ep::DType::fp64;
    args.logits = in.logits.data();
    args.padding = reinterpret_cast<const bool*>(in.padding.data());
    args.ids = out.ids.data();
    args.grad_weights = out.weights.data();
    args.grad_probs = in.logits.data();
    args.grad_aux_scores = with_aux ? in.logits.data() : nullptr;
    args.grad_logits = out.grad.data();
    return args;
}

template <class R>
void run_as_warp(const ep::RouterConfig& config, const ep::RouterForward& forward,
                 const ep::RouterBackward& backward) {
    std::vector<R> score(config.experts), grad(config.experts), weight(ep::kMaxTopk),
        pick_grad(ep::kMaxTopk);
    std::vector<Key<R>> key(config.experts), group_key(config.groups);
    std::vector<int32_t> id(ep::kMaxTopk);
    std::vector<std::jthread> lanes;
    for (int lane = 0; lane < kLanes; ++lane) {
        lanes.emplace_back([&, lane] {
            this_lane = lane;
            ep::router::WarpTeam team{lane};
            for (int64_t row = 0; row < forward.tokens; ++row) {
                ep::router::forward_row<R>(
                    team, config, forward, row,
                    {score.data(), key.data(), group_key.data(), weight.data(), id.data()});
                ep::router::backward_row<R>(
                    team, config, backward, row,
                    {score.data(), grad.data(), weight.data(), pick_grad.data(), id.data()});
            }
        });
    }
}

template <class R>
bool near(const std::vector<R>& a, const std::vector<R>& b, const char* what) {
    const R tolerance = std::is_same_v<R, float> ? R(2e-5) : R(1e-13);
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i] || (a[i] != a[i] && b[i] != b[i])) continue;
        if (std::fabs(a[i] - b[i]) <= tolerance * std::max(R(1e-3), std::fabs(b[i]))) continue;
        std::printf("%s[%zu] is %g, on the host %g\n", what, i, double(a[i]), double(b[i]));
        return false;
    }
    return true;
}

template <class R>
bool test(const ep::RouterConfig& config, int seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    Inputs<R> in{3, {}, {}, {0, 0, 1}};
    for (int64_t i = 0; i < in.tokens * config.experts; ++i) {
        const float value = normal(generator);
        in.logits.push_back(seed % 2 ? std::round(value) : value);  // odd seeds: ties
    }
    if (seed % 5 == 4)
        in.logits[0] = NAN, in.logits[config.experts] = -INFINITY,
        in.logits[config.experts + 1] = -0.0f;
    for (int e = 0; e < config.experts; ++e) in.bias.push_back(float(e % 3) / 8);

    Results<R> host(in.tokens, config), warp(in.tokens, config);
    ep::router_forward_host(config, forward_of(config, in, host), 1);
    ep::router_backward_host(config, backward_of(in, host, seed % 3), 1);
    run_as_warp<R>(config, forward_of(config, in, warp), backward_of(in, warp, seed % 3));
    const bool same = warp.ids == host.ids && warp.counts == host.counts &&
                      warp.routing_map == host.routing_map && warp.aux_map == host.aux_map &&
                      near(warp.weights, host.weights, "weights") &&
                      near(warp.probs, host.probs, "probs") &&
                      near(warp.aux_scores, host.aux_scores, "aux_scores") &&
                      near(warp.grad, host.grad, "grad_logits");
    if (!same) {
        std::printf(
            "E %d, K %d, groups %d of %d, score function %d, seed %d differ from the host\n",
            config.experts, config.topk, config.group_topk, config.groups, int(config.score), seed);
    }
    return same;
}

}  // namespace

int main() {
    using ep::ScoreFunction;
    const ep::RouterConfig configs[] = {
        {64, 8, 8, 4, ScoreFunction::Sigmoid, true, 2.5},
        {96, 4, 1, 1, ScoreFunction::Sigmoid, false, 1.0},
        {60, 6, 5, 3, ScoreFunction::PreSoftmax, true, 1.0},
        {33, 32, 1, 1, ScoreFunction::PreSoftmax, false, 0.5},
        {40, 5, 4, 2, ScoreFunction::PostSoftmax, false, 2},
        {7, 1, 7, 1, ScoreFunction::Sigmoid, false, 2.5},
    };
    int seed = 0;
    for (const ep::RouterConfig& config : configs) {
        for (int i = 0; i < 2; ++i, ++seed) {  // of each type every other one has ties
            const bool is_float = (seed + seed / 2) % 2;
            if (!(is_float ? test<float> : test<double>)(config, seed)) return EXIT_FAILURE;
        }
    }
    return EXIT_SUCCESS;
}
