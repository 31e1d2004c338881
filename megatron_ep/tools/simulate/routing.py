"""The experts that tokens of a simulated rank choose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from megatron_ep.config import require_int

if TYPE_CHECKING:
    from megatron_ep.tools.simulate.case import Case

ALLOWED = "uniform, zipf:S with S in [0, 4], or nodes:M"


def check(case: Case) -> None:
    """Raises ValueError for an invalid routing."""
    kind, _, text = case.routing.partition(":")
    error = ValueError(f"routing is {case.routing!r}, must be {ALLOWED}")
    if kind == "uniform" and not text:
        return
    try:
        value = float(text) if kind == "zipf" else int(text)
    except ValueError:
        raise error from None
    if kind == "nodes":
        nodes = case.topology.nodes
        require_int("M of routing nodes:M", value, -(-case.topk // (case.config.num_experts // nodes)), nodes)
    elif kind != "zipf" or not math.isfinite(value) or not 0 <= value <= 4:
        raise error


def draw(case: Case, rank: int) -> torch.Tensor:
    """Returns int32 [T, K], distinct experts per token of a rank, drawn without replacement.

    The case's routing is "uniform": equal weights; "zipf:S": expert i has weight 1 / (i + 1)^S; or "nodes:M": equal
    weights, limited to M random nodes per token.
    """
    kind, _, text = case.routing.partition(":")
    num_tokens, num_experts, nodes = case.num_tokens, case.config.num_experts, case.topology.nodes
    generator = torch.Generator().manual_seed((case.seed << 20) + rank)
    # The topk largest of log(weight) + Gumbel noise are drawn without replacement.
    keys = torch.rand(num_tokens, num_experts, generator=generator).clamp_(min=1e-30)
    if kind == "zipf":
        keys = -(-keys.log_()).log_()
        keys -= float(text) * torch.arange(1, num_experts + 1).log()
    elif kind == "nodes":
        chosen = torch.rand(num_tokens, nodes, generator=generator).topk(int(text), sorted=False).indices
        allowed = torch.zeros(num_tokens, nodes, dtype=torch.bool).scatter_(1, chosen, True)
        keys *= allowed.repeat_interleave(num_experts // nodes, dim=1)
    return keys.topk(case.topk, sorted=False).indices.to(torch.int32).contiguous()
