#pragma once

// The router's formulas for one row, forward and backward, over a Team.

#include "core/row.h"
#include "router/number.h"
#include "router/router.h"
#include "router/team.h"

namespace ep::router {

// Added to every divisor that is a sum, as in Megatron-Core.
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

// Whether an earlier choice of the token names the same expert, which only replayed choices may:
// the first stands for all of them.
template <class Id>
EP_FN bool is_repeated(const Id* ids, int k) {
    for (int j = 0; j < k; ++j) {
        if (ids[j] == ids[k]) return true;
    }
    return false;
}

// scores[e]: what experts are chosen by (before the bias), and what weights are computed from.
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

// Divides memory into arrays. All element types have 4 or 8 bytes, so taking the wide ones first
// keeps every array aligned.
class ScratchArrays {
  public:
    EP_HD explicit ScratchArrays(unsigned char* memory) : memory_(memory), next_(memory) {}

    template <class T>
    EP_HD T* take(int count) {
        T* const array = reinterpret_cast<T*>(next_);
        next_ += count * sizeof(T);
        return array;
    }
    EP_HD size_t bytes() const { return next_ - memory_; }

  private:
    unsigned char *memory_, *next_;
};

// A team's memory for one row.
template <class R>
struct ForwardScratch {
    R* score;           // [E]
    Key<R>* key;        // [E]
    Key<R>* group_key;  // [groups]
    R* weight;          // [kMaxTopk]
    int32_t* id;        // [kMaxTopk]

    static EP_HD ForwardScratch in(ScratchArrays& arrays, const RouterConfig& config) {
        return {arrays.take<R>(config.experts), arrays.take<Key<R>>(config.experts),
                arrays.take<Key<R>>(config.groups), arrays.take<R>(kMaxTopk),
                arrays.take<int32_t>(kMaxTopk)};
    }
};

// Bytes of a team's ForwardScratch or BackwardScratch.
template <class Scratch>
size_t scratch_bytes(const RouterConfig& config) {
    ScratchArrays arrays(nullptr);
    Scratch::in(arrays, config);
    return align_up(arrays.bytes(), 16);
}

// Excludes the experts of all but the best groups. A group's score is the sum of its topk /
// group_topk best.
template <class Team, class R>
EP_FN void keep_best_groups(Team& team, const RouterConfig& config, const ForwardScratch<R>& s) {
    const int group_size = config.experts / config.groups;
    for (int group = 0; group < config.groups; ++group) {
        const R sum = team.template sum_top<R>(s.key + group * group_size, group_size,
                                               config.topk / config.group_topk);
        team.once([&] { s.group_key[group] = to_key(sum); });
    }
    team.take_top(s.group_key, config.groups, config.group_topk, [](int, int) {});
    for (int group = 0; group < config.groups; ++group) {
        const bool kept = s.group_key[group] == kNoKey<Key<R>>;
        Key<R>* const keys = s.key + group * group_size;
        if (!kept) team.each(group_size, [=](int i) { keys[i] = kNoKey<Key<R>>; });
    }
}

// Computes s.id from s.score.
template <class Team, class R>
EP_FN void choose(Team& team, const RouterConfig& config, const float* bias,
                  const ForwardScratch<R>& s) {
    Key<R>* const keys = s.key;
    const R* const scores = s.score;
    if (bias) {
        team.each(config.experts, [=](int e) { keys[e] = to_key(scores[e] + R(bias[e])); });
    } else {
        team.each(config.experts, [=](int e) { keys[e] = to_key(scores[e]); });
    }
    if (config.groups > 1) keep_best_groups(team, config, s);
    team.take_top(keys, config.experts, config.topk,
                  [&](int rank, int e) { team.once([&] { s.id[rank] = e; }); });
}

// Computes s.weight from s.id and s.score; 0 where there is no expert.
template <class Team, class R>
EP_FN void weigh(Team& team, const RouterConfig& config, const ForwardScratch<R>& s) {
    const int32_t* const ids = s.id;
    const R* const scores = s.score;
    R* const weights = s.weight;
    const R scale = static_cast<R>(config.scaling_factor);
    if (config.score == ScoreFunction::PostSoftmax) {
        const R none = -kInfinity<R>;
        softmax(team, config.topk, weights,
                [=](int k) { return ids[k] < 0 ? none : scores[ids[k]]; });
    } else {
        team.each(config.topk, [=](int k) { weights[k] = ids[k] < 0 ? R(0) : scores[ids[k]]; });
        if (config.renormalize) divide_by_sum(team, config.topk, weights);
    }
    team.each(config.topk, [=](int k) { weights[k] = ids[k] < 0 ? R(0) : weights[k] * scale; });
}

// Turns s.score into the scores of the auxiliary loss, over all experts and without bias, groups or
// scaling.
template <class Team, class R>
EP_FN void write_auxiliary(Team& team, const RouterConfig& config, const RouterForward& args,
                           int64_t row, bool padded, const ForwardScratch<R>& s) {
    R* const out = static_cast<R*>(args.aux_scores) + row * config.experts;
    bool* const map = args.aux_map + row * config.experts;
    R* const scores = s.score;
    Key<R>* const keys = s.key;
    team.each(config.experts, [=](int e) { map[e] = false; });
    if (padded) {
        team.each(config.experts, [=](int e) { out[e] = 0; });
        return;
    }
    if (config.score == ScoreFunction::Sigmoid) divide_by_sum(team, config.experts, scores);
    if (config.score == ScoreFunction::PostSoftmax) {
        softmax(team, config.experts, scores, [=](int e) { return scores[e]; });
    }
    team.each(config.experts, [=](int e) {
        out[e] = scores[e];
        keys[e] = to_key(scores[e]);
    });
    team.take_top(keys, config.experts, config.topk,
                  [&](int, int e) { team.once([&] { map[e] = true; }); });
}

template <class Storage, class Team>
EP_FN void write_dense(Team& team, const RouterConfig& config, const RouterForward& args,
                       int64_t row, const ForwardScratch<Real<Storage>>& s) {
    const int32_t* const ids = s.id;
    const Real<Storage>* const weights = s.weight;
    const bool is_replayed = args.replay_ids;
    auto stands = [=](int k) { return ids[k] >= 0 && !(is_replayed && is_repeated(ids, k)); };
    if (args.probs) {
        Storage* const probs = static_cast<Storage*>(args.probs) + row * config.experts;
        team.each(config.experts, [=](int e) { probs[e] = Storage{}; });
        team.each(config.topk, [=](int k) {
            if (stands(k)) from_real(weights[k], probs[ids[k]]);
        });
    }
    if (args.routing_map) {
        bool* const map = args.routing_map + row * config.experts;
        team.each(config.experts, [=](int e) { map[e] = false; });
        team.each(config.topk, [=](int k) {
            if (stands(k)) map[ids[k]] = true;
        });
    }
}

// Finishes a row of replayed choices. Of repeated ones the first keeps its place. The ids were not
// checked, which would make the host wait: an invalid one stays, for dispatch to reject, and makes
// all weights NaN.
template <class Team, class R>
EP_FN void finish_replay(Team& team, const RouterConfig& config, const int64_t* replay,
                         int64_t* ids, R* weights, const ForwardScratch<R>& s) {
    const int32_t* const chosen = s.id;
    R* const weight = s.weight;
    const int experts = config.experts;
    auto is_none = [=](int k) { return replay[k] < -1 || replay[k] >= experts; };
    const R wrong = team.template max<R>(config.topk, [=](int k) { return R(is_none(k)); });
    team.each(config.topk, [=](int k) {
        if (is_none(k)) ids[k] = replay[k];
        if (chosen[k] >= 0 && is_repeated(chosen, k)) {
            ids[k] = -1;
            weights[k] = 0;
        }
        if (wrong > 0) weights[k] = weight[k] = kInfinity<R> - kInfinity<R>;
    });
}

template <class Storage, class Team>
EP_FN void forward_row(Team& team, const RouterConfig& config, const RouterForward& args,
                       int64_t row, const ForwardScratch<Real<Storage>>& s) {
    const Storage* const logits = static_cast<const Storage*>(args.logits) + row * config.experts;
    const int experts = config.experts;
    int32_t* const chosen = s.id;
    const int64_t* const replay = args.replay_ids ? args.replay_ids + row * config.topk : nullptr;

    const bool padded = args.padding && args.padding[row];
    if (!padded) score_experts(team, config, logits, s.score);
    if (padded) {
        team.each(config.topk, [=](int k) { chosen[k] = -1; });
    } else if (replay) {
        team.each(config.topk, [=](int k) {
            const bool exists = replay[k] >= 0 && replay[k] < experts;
            chosen[k] = exists ? static_cast<int32_t>(replay[k]) : -1;
        });
    } else {
        choose(team, config, args.bias, s);
    }
    weigh(team, config, s);
    int64_t* const ids = args.ids + row * config.topk;
    auto* const weights = static_cast<Real<Storage>*>(args.weights) + row * config.topk;
    team.each(config.topk, [&](int k) {
        ids[k] = chosen[k];
        weights[k] = s.weight[k];
        if (chosen[k] >= 0 && !(replay && is_repeated(chosen, k)))
            team.increment(args.tokens_per_expert + chosen[k]);
    });
    if (replay && !padded) finish_replay(team, config, replay, ids, weights, s);
    write_dense<Storage>(team, config, args, row, s);
    if (args.aux_scores) write_auxiliary(team, config, args, row, padded, s);
}

// A team's memory for one row. L is the loss.
template <class R>
struct BackwardScratch {
    R* score;         // [E]
    R* grad;          // [E] dL/d(score), then dL/d(logit)
    R* choice_score;  // [kMaxTopk]
    R* choice_grad;   // [kMaxTopk] dL/d(choice's score), or dL/d(choice's logit) for PostSoftmax
    int32_t* id;      // [kMaxTopk]

    static EP_HD BackwardScratch in(ScratchArrays& arrays, const RouterConfig& config) {
        return {arrays.take<R>(config.experts), arrays.take<R>(config.experts),
                arrays.take<R>(kMaxTopk), arrays.take<R>(kMaxTopk), arrays.take<int32_t>(kMaxTopk)};
    }
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

// Computes s.choice_grad from the gradients of the weights and of the dense probs; the first of
// repeated choices gets that of all.
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
    const bool is_replayed = args.is_replayed;
    team.each(config.topk, [=](int k) {
        const bool exists = ids[k] >= 0 && ids[k] < config.experts;
        const int32_t id = s.id[k] = exists ? static_cast<int32_t>(ids[k]) : -1;
        // As in Megatron's scatter, repeated choices all get the gradient of the first.
        int first = is_replayed ? 0 : k;
        while (ids[first] != ids[k]) ++first;
        R grad = 0;
        if (id >= 0 && grad_weights) grad += grad_weights[first];
        if (id >= 0 && grad_probs) grad += to_real(grad_probs[id]);
        s.choice_grad[k] = grad * scale;
    });
    if (config.score == ScoreFunction::PostSoftmax) {
        const R none = -kInfinity<R>;
        softmax(team, config.topk, s.choice_score,
                [=](int k) { return s.id[k] < 0 ? none : to_real(logits[s.id[k]]); });
        softmax_gradient(team, config.topk, s.choice_score, s.choice_grad);
    } else {
        const bool sigmoids = config.score == ScoreFunction::Sigmoid;
        team.each(config.topk, [=](int k) {
            const int32_t id = s.id[k];
            s.choice_score[k] = id < 0     ? R(0)
                                : sigmoids ? sigmoid(to_real(logits[id]))
                                           : s.score[id];
        });
        if (config.renormalize)
            divide_by_sum_gradient(team, config.topk, s.choice_score, s.choice_grad);
    }
    if (!is_replayed) return;
    team.each(config.topk, [=](int k) {
        if (is_repeated(s.id, k)) return;
        for (int j = k + 1; j < config.topk; ++j) {
            if (s.id[j] == s.id[k]) s.choice_grad[k] += s.choice_grad[j];
        }
    });
}

// Writes the gradient if only the choices' scores have one.
template <class Storage, class Team>
EP_FN void write_sparse_gradient(Team& team, const RouterConfig& config, bool is_replayed,
                                 Storage* out, const BackwardScratch<Real<Storage>>& s) {
    const bool sigmoids = config.score == ScoreFunction::Sigmoid;
    team.each(config.experts, [=](int e) { out[e] = Storage{}; });
    team.each(config.topk, [=](int k) {
        const auto slope = sigmoids ? s.choice_score[k] * (1 - s.choice_score[k]) : 1;
        if (s.id[k] >= 0 && !(is_replayed && is_repeated(s.id, k)))
            from_real(s.choice_grad[k] * slope, out[s.id[k]]);
    });
}

// Writes it if every score has one: it entered a softmax or the scores of the auxiliary loss.
template <class Storage, class Team>
EP_FN void write_dense_gradient(Team& team, const RouterConfig& config, bool is_replayed,
                                const Real<Storage>* grad_aux_scores, Storage* out,
                                const BackwardScratch<Real<Storage>>& s) {
    using R = Real<Storage>;
    const int experts = config.experts;
    const R* const score = s.score;
    R* const grad = s.grad;
    const auto add_choices = [&] {
        team.each(config.topk, [=](int k) {
            if (s.id[k] >= 0 && !(is_replayed && is_repeated(s.id, k)))
                grad[s.id[k]] += s.choice_grad[k];
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
        write_dense_gradient(team, config, args.is_replayed,
                             aux ? aux + row * config.experts : nullptr, out, s);
    } else {
        write_sparse_gradient(team, config, args.is_replayed, out, s);
    }
}

}  // namespace ep::router
