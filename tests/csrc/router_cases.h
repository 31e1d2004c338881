#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "router/router.h"
#include "tensor.h"

namespace ep {

// What a gate of random rows is given; R: float or double.
template <class R>
struct RouterInputs {
    int64_t tokens;
    std::vector<R> logits;
    std::vector<float> bias;
    std::vector<char> padding;

    // Every third token is padding.
    RouterInputs(const RouterConfig& config, int64_t count, int seed, bool has_ties)
        : tokens(count) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < tokens * config.experts; ++i) {
            const float value = normal(random);
            logits.push_back(has_ties ? std::round(value) : value);
        }
        for (int expert = 0; expert < config.experts; ++expert)
            bias.push_back(static_cast<float>(expert % 3) / 8);
        for (int64_t token = 0; token < tokens; ++token) padding.push_back(token % 3 == 2);
    }
};

template <class R>
struct RouterResults {
    Tensor<int64_t> ids;
    std::vector<int64_t> counts;
    Tensor<R> weights, probs, aux_scores, grad;
    Tensor<char> routing_map, aux_map;

    RouterResults(int64_t tokens, const RouterConfig& config)
        : ids(tokens * config.topk),
          counts(config.experts),
          weights(ids.size()),
          probs(tokens * config.experts),
          aux_scores(probs.size()),
          grad(probs.size()),
          routing_map(probs.size()),
          aux_map(probs.size()) {}
    bool operator==(const RouterResults&) const = default;
};

template <class R>
RouterForward forward_of(const RouterConfig& config, const RouterInputs<R>& in,
                         RouterResults<R>& out) {
    RouterForward args{};
    args.tokens = in.tokens;
    args.dtype = std::is_same_v<R, float> ? DType::fp32 : DType::fp64;
    args.logits = in.logits.data();
    args.bias = config.score == ScoreFunction::Sigmoid ? in.bias.data() : nullptr;
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
RouterBackward backward_of(const RouterInputs<R>& in, RouterResults<R>& out, bool with_aux) {
    RouterBackward args{};
    args.tokens = in.tokens;
    args.dtype = std::is_same_v<R, float> ? DType::fp32 : DType::fp64;
    args.logits = in.logits.data();
    args.padding = reinterpret_cast<const bool*>(in.padding.data());
    args.ids = out.ids.data();
    args.grad_weights = out.weights.data();
    args.grad_probs = in.logits.data();
    args.grad_aux_scores = with_aux ? in.logits.data() : nullptr;
    args.grad_logits = out.grad.data();
    return args;
}

}  // namespace ep
