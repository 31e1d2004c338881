"""Floating-point operations of a training step, as Megatron-LM counts them for its own log line.

Source: `num_floating_point_operations` in Megatron-LM 0.19 (megatron/training/training.py), which follows Narayanan et
al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (SC 2021), appendix. Counted are
the matrix products of attention, dense and expert MLPs and the output layer, 2 operations for a multiplication and an
addition, three times: the backward pass takes two products for each one forward. Causal attention counts half of its
scores. Not counted: the router, norms, and what recomputation repeats.
"""

from __future__ import annotations

from megatron_ep.training.sections import Model

FORWARD_AND_BACKWARD = 3


def of_step(model: Model, sequences: int, seq_length: int, vocab_size: int) -> float:
    """Operations of one step of the whole model, on all ranks together.

    Args:
        model: of the recipe; each token is taken to reach moe_router_topk experts, as if no capacity dropped any.
        sequences: in the global batch, of seq_length tokens each.
        vocab_size: rows of the output layer.
    """
    hidden, heads = model.hidden_size, model.num_attention_heads
    width = heads * (model.kv_channels or hidden // heads)
    kv_width = width // heads * (model.num_query_groups or heads)
    attention = 2 * hidden * (2 * width + 2 * kv_width) + 2 * seq_length * width
    moe_layers = sum(_moe_layers(model))
    per_ffn = 2 * hidden * (3 if model.gated_linear_unit else 2)  # for each column of its width
    experts = model.moe_router_topk * model.moe_ffn_hidden_size + (model.moe_shared_expert_intermediate_size or 0)
    forward = (
        model.num_layers * attention
        + moe_layers * per_ffn * experts
        + (model.num_layers - moe_layers) * per_ffn * model.ffn_hidden_size
        + 2 * hidden * vocab_size
    )
    return float(FORWARD_AND_BACKWARD * sequences * seq_length * forward)


def _moe_layers(model: Model) -> list[int]:
    """1 for each layer with experts."""
    if isinstance(model.moe_layer_freq, list):
        return list(model.moe_layer_freq)
    return [int(layer % model.moe_layer_freq == 0) for layer in range(model.num_layers)]
