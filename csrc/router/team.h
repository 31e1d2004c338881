#pragma once

// What the router computes for one token is written once for both backends, over a Team: the host's
// is one thread whose loops are vectorised, CUDA's is a warp. A Team offers
//
//   each(n, f)                   f(i) for every i in [0, n), in any order; done before what the
//   team does next once(f)                      f() by one member; done before what the team does
//   next sum<R>(n, f)                 f(0) + ... + f(n - 1) max<R>(n, f)                 the
//   largest f(i), ignoring NaN; -inf when there is none count_and_next(keys, n, k)   how many keys
//   equal k, and the largest key below it, kNoKey when there is none take_top(keys, n, count, f)
//   f(rank, index) for the `count` largest keys, best first, among equals the lowest index
//                                first; those keys become kNoKey; count <= n
//   increment(counter)           adds 1 to a counter that all teams share

#include "core/row.h"
#include "router/number.h"
#include "router/router.h"

namespace ep::router {

// Added to every sum that divides, as in Megatron-Core.
constexpr double kEpsilon = 1e-20;

// out[i] = softmax(f(0), ..., f(n - 1))[i]. As in torch, all are NaN with a NaN or +inf among them,
// or nothing but -inf.
template <class R, class Team, class F>
EP_FN void softmax(Team& team, int n, R* out, F f) {
    const R largest = team.template max<R>(n, f);
    team.each(n, [=](int i) { out[i] = exponential(f(i) - largest); });
    const R total = team.template sum<R>(n, [=](int i) { return out[i]; });
    team.each(n, [=](int i) { out[i] /= total; });
}

template <class K>
struct KeyCount {
    int count;
    K next;
};

template <class R, class Team>
EP_FN void divide_by_sum(Team& team, int n, R* values) {
    const R total = team.template sum<R>(n, [=](int i) { return values[i]; }) + R(kEpsilon);
    team.each(n, [=](int i) { values[i] /= total; });
}

// scores[e]: what an expert is chosen by, before the bias, and what its weight is made of.
template <class Team, class Storage, class R>
EP_FN void score_experts(Team& team, const RouterConfig& config, const Storage* logits, R* scores) {
    if (config.score == ScoreFunction::Sigmoid) {
        team.each(config.experts, [=](int e) { scores[e] = sigmoid(to_real(logits[e])); });
    } else if (config.score == ScoreFunction::PreSoftmax) {
        softmax(team, config.experts, scores, [=](int e) { return to_real(logits[e]); });
    } else {
        team.each(config.experts, [=](int e) { scores[e] = to_real(logits[e]); });
    }
}

}  // namespace ep::router
