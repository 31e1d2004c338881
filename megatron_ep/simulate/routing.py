"""Which experts the tokens of a simulated rank choose."""

from __future__ import annotations

import math

import torch

from megatron_ep.config import Topology, require_int

ALLOWED = "uniform, zipf:S with S in [0, 4], or nodes:M"


def check(routing: str, topology: Topology, topk: int, num_experts: int) -> None:
    """Raises ValueError for a routing that there is not."""
    kind, _, text = routing.partition(":")
    error = ValueError(f"routing is {routing!r}, must be {ALLOWED}")
    if kind == "uniform" and not text:
        return
    try:
        value = float(text) if kind == "zipf" else int(text)
    except ValueError:
        raise error from None
    if kind == "nodes":
        least = -(-topk // (num_experts // topology.nodes))
        require_int("M of routing nodes:M", value, least, topology.nodes)
    elif kind != "zipf" or not math.isfinite(value) or not 0 <= value <= 4:
        raise error


def draw(
    routing: str, topology: Topology, *, rank: int, num_tokens: int, topk: int, num_experts: int, seed: int
) -> torch.Tensor:
    """int32 [T, K], different experts of a token, drawn without replacement.

    uniform: each expert alike. zipf:S: expert i with weight 1 / (i + 1)^S. nodes:M: of experts on M nodes of a token,
    drawn alike.
    """
    kind, _, text = routing.partition(":")
    generator = torch.Generator().manual_seed((seed << 20) + rank)
    # the topk largest of log(weight) + Gumbel noise
    keys = torch.rand(num_tokens, num_experts, generator=generator).clamp_(min=1e-30)
    if kind == "zipf":
        keys = -(-keys.log_()).log_()
        keys -= float(text) * torch.arange(1, num_experts + 1).log()
    elif kind == "nodes":
        chosen = torch.rand(num_tokens, topology.nodes, generator=generator).topk(int(text), sorted=False).indices
        allowed = torch.zeros(num_tokens, topology.nodes, dtype=torch.bool).scatter_(1, chosen, True)
        keys *= allowed.repeat_interleave(num_experts // topology.nodes, dim=1)
    return keys.topk(topk, sorted=False).indices.to(torch.int32).contiguous()
