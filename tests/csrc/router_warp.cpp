// The router's code for a warp of a GPU, lane by lane on the host (simt/simt.h): results must be
// the host's, and every exchange through memory is ordered by a __syncwarp.

#include "simt.h"
#undef __CUDACC__  // numbers are the host's: conversions of halves and exp need no CUDA headers
// after it
#include "programs.h"
#include "router/rows.h"
#include "router/warp_team.h"
#include "router_cases.h"

namespace ep {
namespace {

template <class R>
void run_as_warp(const RouterConfig& config, const RouterInputs<R>& in, RouterResults<R>& out,
                 int seed) {
    Tensor<R> score(config.experts), grad(config.experts), weight(kMaxTopk), choice_grad(kMaxTopk);
    Tensor<router::Key<R>> key(config.experts), group_key(config.groups);
    Tensor<int32_t> id(kMaxTopk);
    const RouterForward forward = forward_of(config, in, out);
    const RouterBackward backward = backward_of(in, out, seed % 3);
    simt::run(1, 1, 32, seed, [&] {
        router::WarpTeam team{static_cast<int>(simt::lane())};
        for (int64_t row = 0; row < in.tokens; ++row) {
            router::forward_row<R>(
                team, config, forward, row,
                {score.data(), key.data(), group_key.data(), weight.data(), id.data()});
            router::backward_row<R>(
                team, config, backward, row,
                {score.data(), grad.data(), weight.data(), choice_grad.data(), id.data()});
        }
    });
}

template <class R>
bool near(const Tensor<R>& a, const Tensor<R>& b, const char* what) {
    const R tolerance = std::is_same_v<R, float> ? R(2e-5) : R(1e-13);
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] == b[i] || (a[i] != a[i] && b[i] != b[i])) continue;
        if (std::fabs(a[i] - b[i]) <= tolerance * std::max(R(1e-3), std::fabs(b[i]))) continue;
        std::fprintf(stderr, "%s[%zu] is %g, on the host %g\n", what, i, double(a[i]),
                     double(b[i]));
        return false;
    }
    return true;
}

template <class R>
void check(const RouterConfig& config, int seed) {
    RouterInputs<R> in(config, 3, seed, seed % 2);
    if (seed % 5 == 4)
        in.logits[0] = NAN, in.logits[config.experts] = -INFINITY,
        in.logits[config.experts + 1] = -0.0f;
    RouterResults<R> host(in.tokens, config), warp(in.tokens, config);
    router_forward_host(config, forward_of(config, in, host), 1);
    router_backward_host(config, backward_of(in, host, seed % 3), 1);
    run_as_warp(config, in, warp, seed);
    const bool same = warp.ids == host.ids && warp.counts == host.counts &&
                      warp.routing_map == host.routing_map && warp.aux_map == host.aux_map &&
                      near(warp.weights, host.weights, "weights") &&
                      near(warp.probs, host.probs, "probs") &&
                      near(warp.aux_scores, host.aux_scores, "aux_scores") &&
                      near(warp.grad, host.grad, "grad_logits");
    if (!same) {
        std::fprintf(stderr, "E %d, K %d, groups %d of %d, score function %d, seed %d\n",
                     config.experts, config.topk, config.group_topk, config.groups,
                     static_cast<int>(config.score), seed);
        simt::die("a warp differs from the host");
    }
}

void check_all() {
    const RouterConfig configs[] = {
        {64, 8, 8, 4, ScoreFunction::Sigmoid, true, 2.5},
        {96, 4, 1, 1, ScoreFunction::Sigmoid, false, 1.0},
        {60, 6, 5, 3, ScoreFunction::PreSoftmax, true, 1.0},
        {33, 32, 1, 1, ScoreFunction::PreSoftmax, false, 0.5},
        {40, 5, 4, 2, ScoreFunction::PostSoftmax, false, 2},
        {7, 1, 7, 1, ScoreFunction::Sigmoid, false, 2.5},
    };
    int seed = 0;
    for (const RouterConfig& config : configs) {
        for (int i = 0; i < 4; ++i, ++seed)  // of each type every other one has ties
            (i % 2 ? check<float> : check<double>)(config, seed + i / 2);
    }
}

}  // namespace
}  // namespace ep

int main(int argc, char** argv) {
    constexpr simt::Named kNamed[] = {
        {"configurations", ep::check_all, "a warp has the host's results"}};
    return simt::run_program(argc, argv, kNamed, "", [](uint64_t) {});
}
