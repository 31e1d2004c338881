// The router, forward and backward: it chooses the experts of each token and weighs them.
#pragma once

#include <cstdint>

#include "core/dtypes.h"

namespace ep {

// Shapes: T tokens, E experts, K choices per token (top-k). All arrays are contiguous.

// What the weight of a choice is computed from: sigmoid(logit), the softmax over all experts, or
// the softmax over the choices.
enum class ScoreFunction : int { Sigmoid = 0, PreSoftmax = 1, PostSoftmax = 2 };

struct RouterConfig {
    int experts;     // E
    int topk;        // K <= kMaxTopk
    int groups;      // 1: no groups; divides E
    int group_topk;  // groups that a token may pick from; <= K
    ScoreFunction score;
    bool renormalize;       // divide the weights by their sum (+ 1e-20); PostSoftmax: false
    double scaling_factor;  // factor of the weights
};

// fp32 and 16-bit logits are computed in fp32 ("real" below), fp64 logits in fp64. Null: an input
// that is not given, or an output that is not wanted.
struct RouterForward {
    int64_t tokens;             // T
    DType dtype;                // of the logits and the dense probs
    const void* logits;         // [T, E]
    const float* bias;          // [E], added to the scores for the choice only | null
    const bool* padding;        // [T], true: the token gets no expert | null
    const int64_t* replay_ids;  // [T, K], instead of a choice, repeats are merged | null

    int64_t* ids;                // [T, K], -1: none
    void* weights;               // [T, K], real
    int64_t* tokens_per_expert;  // [E]
    void* probs;                 // [T, E], 0 where not chosen | null
    bool* routing_map;           // [T, E] | null
    void* aux_scores;            // [T, E], real: scores normalised over all experts | null
    bool* aux_map;  // [T, E]: top K of the aux_scores | null, exactly when aux_scores is
};

// The gradient of the logits, from those of weights, probs and aux_scores, each of them or null.
struct RouterBackward {
    int64_t tokens;
    DType dtype;          // of the logits, the dense probs and their gradients
    const void* logits;   // [T, E], as in the forward pass
    const bool* padding;  // [T] | null, as in the forward pass
    const int64_t* ids;   // [T, K], from the forward pass, or its replay_ids
    bool is_replayed;     // whether ids are replay_ids

    const void* grad_weights;     // [T, K], real | null
    const void* grad_probs;       // [T, E] | null
    const void* grad_aux_scores;  // [T, E], real | null
    void* grad_logits;            // [T, E]
};

// Runs on at most max_threads threads of this process; few tokens take the caller's thread alone.
void router_forward_host(const RouterConfig& config, const RouterForward& args, int max_threads);
void router_backward_host(const RouterConfig& config, const RouterBackward& args, int max_threads);

// Enqueues on a CUDA stream of the current device. Throws std::invalid_argument if E is too large
// for the device's shared memory, std::runtime_error if the launch fails.
void router_forward_cuda(const RouterConfig& config, const RouterForward& args, void* stream);
void router_backward_cuda(const RouterConfig& config, const RouterBackward& args, void* stream);

}  // namespace ep
