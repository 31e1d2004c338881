#pragma once

#include "core/row.h"
#include "router/core/args.h"
#include "router/core/number.h"
#include "router/exec/team.h"

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
