"""The six steps of a Megatron dispatcher in sequence, forward and backward; and what is said of whole layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from shared_settings import configured

from megatron_ep.megatron.equivalence import compare_layers


def compare_configured(settings: Mapping[str, Any], *arguments: Any) -> dict[str, float]:
    """`compare_layers` with these settings of ours."""
    with configured(**settings):
        return compare_layers(*arguments)


def assert_small(by_rank: Sequence[Mapping[str, float]], tolerance: float) -> None:
    """All differences that `compare_layers` found."""
    worst = max((difference, name) for differences in by_rank for name, difference in differences.items())
    assert worst[0] <= tolerance, worst


def run_dispatcher(
    dispatcher: MoETokenDispatcher, x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Runs the six steps of a dispatcher, with experts that depend on their id and TP rank, and the backward pass.

    Args:
        x: [T, H].
        routing_map: bool [T, E].
        probs: [T, E].
        grad: [T, H], the gradient of the output.

    Returns:
        output [T, H], x_grad [T, H], probs_grad [T, E], rows [R, H], counts int64 [L], row_probs [R].
    """
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    sent, sent_probs = dispatcher.dispatch_preprocess(x, routing_map.clone(), probs)  # Megatron's pads it in place
    rows, row_probs = dispatcher.token_dispatch(sent, sent_probs)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    expert = torch.tensor(dispatcher.local_expert_indices, device="cpu").repeat_interleave(counts)
    frequency = 1 + expert + dispatcher.config.num_moe_experts * dispatcher.tp_rank
    expert_output = torch.sin(rows * frequency.unsqueeze(1)) * row_probs.unsqueeze(1)
    output = dispatcher.combine_preprocess(expert_output.to(rows.dtype))
    output = dispatcher.combine_postprocess(dispatcher.token_combine(output))
    output.backward(grad)
    return {
        "output": output.detach(),
        "x_grad": x.grad,
        "probs_grad": probs.grad,
        "rows": rows.detach(),
        "counts": counts,
        "row_probs": row_probs.detach(),
    }
