#pragma once

#include "router/row/scores.h"

namespace ep::router {

// A team's memory for one row. L is the loss.
template <class R>
struct BackwardScratch {
    R* score;         // [E]
    R* grad;          // [E] dL/d(score), then dL/d(logit)
    R* choice_score;  // [kMaxTopk]
    R* choice_grad;   // [kMaxTopk] dL/d(choice's score), or dL/d(choice's logit) for PostSoftmax
    int32_t* id;      // [kMaxTopk]
};

// y = softmax(x): turns dL/dy into dL/dx.
template <class R, class Team>
EP_FN void softmax_gradient(Team& team, int n, const R* y, R* grad) {
    const R dot = team.template sum<R>(n, [=](int i) { return grad[i] * y[i]; });
    team.each(n, [=](int i) { grad[i] = y[i] * (grad[i] - dot); });
}

// y = x / (sum(x) + epsilon): turns dL/dy into dL/dx.
template <class R, class Team>
EP_FN void divide_by_sum_gradient(Team& team, int n, const R* x, R* grad) {
    const R total = team.template sum<R>(n, [=](int i) { return x[i]; }) + R(kEpsilon);
    const R mean = team.template sum<R>(n, [=](int i) { return grad[i] * x[i]; }) / total;
    team.each(n, [=](int i) { grad[i] = (grad[i] - mean) / total; });
}

// s.choice_grad from the gradients of the weights and of the dense probs.
template <class Storage, class Team>
EP_FN void choice_gradients(Team& team, const RouterConfig& config, const RouterBackward& args,
                            int64_t row, const Storage* logits,
                            const BackwardScratch<Real<Storage>>& s) {
    using R = Real<Storage>;
    const int64_t* const ids = args.ids + row * config.topk;
    const R* const grad_weights =
        args.grad_weights ? static_cast<const R*>(args.grad_weights) + row * config.topk : nullptr;
    const Storage* const grad_probs =
        args.grad_probs ? static_cast<const Storage*>(args.grad_probs) + row * config.experts
                        : nullptr;
    const R scale = static_cast<R>(config.scaling_factor);
    team.each(config.topk, [=](int k) {
        const int32_t id = s.id[k] = static_cast<int32_t>(ids[k]);
        R grad = 0;
        if (id >= 0 && grad_weights) grad += grad_weights[k];
        if (id >= 0 && grad_probs) grad += to_real(grad_probs[id]);
        s.choice_grad[k] = grad * scale;
    });
    if (config.score == ScoreFunction::PostSoftmax) {
        const R none = -kInfinity<R>;
        softmax(team, config.topk, s.choice_score,
                [=](int k) { return s.id[k] < 0 ? none : to_real(logits[s.id[k]]); });
        softmax_gradient(team, config.topk, s.choice_score, s.choice_grad);
        return;
    }
    const bool sigmoids = config.score == ScoreFunction::Sigmoid;
    team.each(config.topk, [=](int k) {
        const int32_t id = s.id[k];
        s.choice_score[k] = id < 0 ? R(0) : sigmoids ? sigmoid(to_real(logits[id])) : s.score[id];
    });
    if (config.renormalize)
        divide_by_sum_gradient(team, config.topk, s.choice_score, s.choice_grad);
}

// Scores of which only the choices' have a gradient.
template <class Storage, class Team>
EP_FN void write_sparse_gradient(Team& team, const RouterConfig& config, Storage* out,
                                 const BackwardScratch<Real<Storage>>& s) {
    const bool sigmoids = config.score == ScoreFunction::Sigmoid;
    team.each(config.experts, [=](int e) { out[e] = Storage{}; });
    team.each(config.topk, [=](int k) {
        const auto slope = sigmoids ? s.choice_score[k] * (1 - s.choice_score[k]) : 1;
        if (s.id[k] >= 0) from_real(s.choice_grad[k] * slope, out[s.id[k]]);
    });
}

// Every expert's score has a gradient: it entered a softmax or the scores of the auxiliary loss.
template <class Storage, class Team>
EP_FN void write_dense_gradient(Team& team, const RouterConfig& config,
                                const Real<Storage>* grad_aux_scores, Storage* out,
                                const BackwardScratch<Real<Storage>>& s) {
    using R = Real<Storage>;
    const int experts = config.experts;
    const R* const score = s.score;
    R* const grad = s.grad;
    const auto add_choices = [&] {
        team.each(config.topk, [=](int k) {
            if (s.id[k] >= 0) grad[s.id[k]] += s.choice_grad[k];
        });
    };
    if (grad_aux_scores) {
        team.each(experts, [=](int e) { grad[e] = grad_aux_scores[e]; });
    } else {
        team.each(experts, [=](int e) { grad[e] = 0; });
    }
    if (config.score == ScoreFunction::Sigmoid) {
        divide_by_sum_gradient(team, experts, score, grad);
        add_choices();
        team.each(experts, [=](int e) { grad[e] *= score[e] * (1 - score[e]); });
    } else if (config.score == ScoreFunction::PreSoftmax) {
        add_choices();
        softmax_gradient(team, experts, score, grad);
    } else {
        softmax_gradient(team, experts, score, grad);
        add_choices();
    }
    team.each(experts, [=](int e) { from_real(grad[e], out[e]); });
}

template <class Storage, class Team>
EP_FN void backward_row(Team& team, const RouterConfig& config, const RouterBackward& args,
                        int64_t row, const BackwardScratch<Real<Storage>>& s) {
    using R = Real<Storage>;
    const Storage* const logits = static_cast<const Storage*>(args.logits) + row * config.experts;
    Storage* const out = static_cast<Storage*>(args.grad_logits) + row * config.experts;
    if (args.padding && args.padding[row]) {
        team.each(config.experts, [=](int e) { out[e] = Storage{}; });
        return;
    }
    const bool dense = args.grad_aux_scores || config.score == ScoreFunction::PreSoftmax;
    if (dense && config.score == ScoreFunction::PostSoftmax) {
        softmax(team, config.experts, s.score, [=](int e) { return to_real(logits[e]); });
    } else if (dense) {
        score_experts(team, config, logits, s.score);
    }
    choice_gradients(team, config, args, row, logits, s);
    if (dense) {
        const R* const aux = static_cast<const R*>(args.grad_aux_scores);
        write_dense_gradient(team, config, aux ? aux + row * config.experts : nullptr, out, s);
    } else {
        write_sparse_gradient(team, config, out, s);
    }
}

}  // namespace ep::router
