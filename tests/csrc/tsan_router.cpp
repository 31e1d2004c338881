// The router's threads under ThreadSanitizer: rows in parts, counts of every part added up. Results
// must not depend on the number of threads.

#include <cstdio>
#include <random>
#include <vector>

#include "router/router.h"

namespace {

constexpr int kExperts = 96, kTopk = 6;
constexpr int64_t kTokens = 8200;  // enough work for 12 threads

struct Outputs {
    std::vector<int64_t> ids = std::vector<int64_t>(kTokens * kTopk),
                         counts = std::vector<int64_t>(kExperts);
    std::vector<float> weights = std::vector<float>(kTokens * kTopk),
                       probs = std::vector<float>(kTokens * kExperts);
    std::vector<float> aux_scores = std::vector<float>(kTokens * kExperts),
                       grad = std::vector<float>(kTokens * kExperts);
    std::vector<char> routing_map = std::vector<char>(kTokens * kExperts),
                      aux_map = std::vector<char>(kTokens * kExperts);

    bool operator==(const Outputs&) const = default;
};

Outputs run(const std::vector<float>& logits, const std::vector<float>& bias,
            const std::vector<char>& padding, int threads) {
    const ep::RouterConfig config{kExperts, kTopk, 8, 3, ep::ScoreFunction::Sigmoid, true, 2.5};
    Outputs out;
    ep::RouterForward forward{};
    forward.tokens = kTokens;
    forward.dtype = ep::DType::fp32;
    forward.logits = logits.data();
    forward.bias = bias.data();
    forward.padding = reinterpret_cast<const bool*>(padding.data());
    forward.ids = out.ids.data();
    forward.weights = out.weights.data();
    forward.tokens_per_expert = out.counts.data();
    forward.probs = out.probs.data();
    forward.routing_map = reinterpret_cast<bool*>(out.routing_map.data());
    forward.aux_scores = out.aux_scores.data();
    forward.aux_map = reinterpret_cast<bool*>(out.aux_map.data());
    ep::router_forward_host(config, forward, threads);

    ep::RouterBackward backward{};
    backward.tokens = kTokens;
    backward.dtype = ep::DType::fp32;
    backward.logits = logits.data();
    backward.padding = forward.padding;
    backward.ids = out.ids.data();
    backward.grad_weights = out.weights.data();
    backward.grad_probs = out.probs.data();
    backward.grad_aux_scores = out.aux_scores.data();
    backward.grad_logits = out.grad.data();
    ep::router_backward_host(config, backward, threads);
    return out;
}

}  // namespace

int main() {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> logits(kTokens * kExperts), bias(kExperts);
    std::vector<char> padding(kTokens);
    for (float& logit : logits) logit = normal(generator);
    for (float& value : bias) value = normal(generator) / 100;
    for (int64_t row = 0; row < kTokens; row += 7) padding[row] = 1;

    const Outputs alone = run(logits, bias, padding, 1);
    int64_t choices = 0;
    for (int64_t count : alone.counts) choices += count;
    if (choices != (kTokens - (kTokens + 6) / 7) * kTopk) {
        std::printf("%lld choices were counted\n", static_cast<long long>(choices));
        return 1;
    }
    for (int threads : {2, 4, 12}) {
        if (!(run(logits, bias, padding, threads) == alone)) {
            std::printf("%d threads give another result than one\n", threads);
            return 1;
        }
    }
    return 0;
}
