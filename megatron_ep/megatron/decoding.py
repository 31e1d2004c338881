"""The low-latency mode in a layer, for the few tokens of a decoding step.

T tokens on this rank, H hidden, K choices per token, L local experts, C rows per expert, R = L * C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import megatron_ep as ep
from megatron_ep import float8
from megatron_ep.low_latency.handle import LowLatencyHandle


@dataclass(frozen=True)
class Arrival:
    """The format of received rows.

    capacity: C.
    as_float8: whether rows are sent as float8, as with `forward_dtype` of `megatron_ep.dispatch`.
    clear: whether rows without a token are zeros; otherwise they are undefined.
    """

    capacity: int
    as_float8: bool
    clear: bool


def dispatch_step(
    low_latency: ep.LowLatency, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, arrival: Arrival
) -> ep.Received:
    """Returns rows [R, H] and probs [R], equal to those of `megatron_ep.dispatch` with expert_capacity except in rows
    without a token.

    x: [T, H].
    topk_idx, weights: [T, K].
    """
    values, scales = float8.quantize(x) if arrival.as_float8 else (x, None)
    received = low_latency.dispatch(values, topk_idx, weights, expert_capacity=arrival.capacity, scales=scales)
    rows = float8.dequantize(received.x, received.scales, x.dtype) if arrival.as_float8 else received.x
    if arrival.clear:
        place = torch.arange(arrival.capacity, device=x.device)
        rows.masked_fill_((place >= received.recv_counts.unsqueeze(1)).unsqueeze(2), 0)
    return ep.Received(
        x=rows.flatten(0, 1),
        probs=received.probs.flatten(),
        scales=None,
        tokens_per_expert=received.recv_counts.long(),
        overflow=received.overflow,
        handle=received.handle,
    )


def combine(
    low_latency: ep.LowLatency, x: torch.Tensor, handle: LowLatencyHandle, weights: torch.Tensor | None
) -> torch.Tensor:
    """Returns the sums [T, H] of each token's rows.

    A rank first sums the rows of its experts, and these sums are added in the order of ranks. The normal mode does the
    same within a node, so that the results there are bitwise equal.

    x: [R, H].
    weights: [R], fp32 or fp64: factor of each row; or None.
    """
    num_experts = low_latency.buffer.num_local_experts
    by_expert = x.unflatten(0, (num_experts, -1))
    factors = None if weights is None else weights.unflatten(0, (num_experts, -1))
    return low_latency.combine(by_expert, handle, row_weights=factors, sum_at="expert")
