#pragma once

#include "router/row/scores.h"

namespace ep::router {

// A team's memory for one row.
template <class R>
struct ForwardScratch {
    R* score;           // [E]
    Key<R>* key;        // [E]
    Key<R>* group_key;  // [groups]
    R* weight;          // [kMaxTopk]
    int32_t* id;        // [kMaxTopk]
};

// Takes the experts of all but the best groups out of the choice. A group's score is the sum of its
// best topk / group_topk scores.
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

// s.id from s.score.
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

// s.weight from s.id and s.score; 0 where there is no expert.
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
    if (args.probs) {
        Storage* const probs = static_cast<Storage*>(args.probs) + row * config.experts;
        team.each(config.experts, [=](int e) { probs[e] = Storage{}; });
        team.each(config.topk, [=](int k) {
            if (ids[k] >= 0) from_real(weights[k], probs[ids[k]]);
        });
    }
    if (args.routing_map) {
        bool* const map = args.routing_map + row * config.experts;
        team.each(config.experts, [=](int e) { map[e] = false; });
        team.each(config.topk, [=](int k) {
            if (ids[k] >= 0) map[ids[k]] = true;
        });
    }
}

template <class Storage, class Team>
EP_FN void forward_row(Team& team, const RouterConfig& config, const RouterForward& args,
                       int64_t row, const ForwardScratch<Real<Storage>>& s) {
    const Storage* const logits = static_cast<const Storage*>(args.logits) + row * config.experts;
    const int experts = config.experts;
    int32_t* const chosen = s.id;

    const bool padded = args.padding && args.padding[row];
    if (!padded) score_experts(team, config, logits, s.score);
    if (padded) {
        team.each(config.topk, [=](int k) { chosen[k] = -1; });
    } else if (args.replay_ids) {
        const int64_t* const replay = args.replay_ids + row * config.topk;
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
        if (chosen[k] >= 0) team.increment(args.tokens_per_expert + chosen[k]);
    });
    write_dense<Storage>(team, config, args, row, s);
    if (args.aux_scores) write_auxiliary(team, config, args, row, padded, s);
}

}  // namespace ep::router
