"""The experts that tokens of a simulated rank choose."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch

from megatron_ep.config import Topology, require_int
from megatron_ep.normal import expert_ids

ALLOWED = "uniform, zipf:S with S in [0, 4], nodes:M, or trace:FILE"


def check(
    routing: str, topology: Topology, *, simulated_ranks: int, num_tokens: int, topk: int, num_experts: int
) -> None:
    """Raises ValueError for an invalid routing."""
    kind, _, text = routing.partition(":")
    if kind == "trace" and text:
        traced = _read(text)
        if len(traced) < simulated_ranks or traced.shape[1] < num_tokens or traced.shape[2] != topk:
            ranks, tokens, chosen = traced.shape
            raise ValueError(
                f"routing {routing}: has {ranks} ranks of {tokens} tokens with {chosen} experts, must have at least "
                f"{simulated_ranks} ranks of {num_tokens} tokens with {topk}"
            )
        if int(traced.min()) < -1 or int(traced.max()) >= num_experts:
            raise ValueError(f"routing {routing}: experts must be in [-1, {num_experts})")
        repeated = expert_ids.first_invalid(traced[:simulated_ranks, :num_tokens].flatten(0, 1), num_experts)
        if repeated is not None:
            rank, token = divmod(repeated, num_tokens)
            raise ValueError(
                f"routing {routing}: token {token} of rank {rank} has an expert twice, must have different ones"
            )
        return
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
    """Returns int32 [T, K], distinct experts per token, drawn without replacement.

    routing: "uniform": equal weights. "zipf:S": expert i has weight 1 / (i + 1)^S. "nodes:M": equal weights, limited to
        M random nodes per token. "trace:FILE": the first tokens of a file of `torch.save`, integers [ranks, T, K].
    """
    kind, _, text = routing.partition(":")
    if kind == "trace":
        return _read(text)[rank, :num_tokens].to(torch.int32).contiguous()
    generator = torch.Generator().manual_seed((seed << 20) + rank)
    # The topk largest of log(weight) + Gumbel noise are drawn without replacement.
    keys = torch.rand(num_tokens, num_experts, generator=generator).clamp_(min=1e-30)
    if kind == "zipf":
        keys = -(-keys.log_()).log_()
        keys -= float(text) * torch.arange(1, num_experts + 1).log()
    elif kind == "nodes":
        chosen = torch.rand(num_tokens, topology.nodes, generator=generator).topk(int(text), sorted=False).indices
        allowed = torch.zeros(num_tokens, topology.nodes, dtype=torch.bool).scatter_(1, chosen, True)
        keys *= allowed.repeat_interleave(num_experts // topology.nodes, dim=1)
    return keys.topk(topk, sorted=False).indices.to(torch.int32).contiguous()


def _read(file: str) -> torch.Tensor:
    try:
        found = _load(file, os.stat(file).st_mtime_ns)
    except Exception as error:  # torch raises many types
        reason = error.strerror if isinstance(error, OSError) else "is no file of torch.save"
        raise ValueError(f"routing trace:{file}: {reason}") from None
    if not isinstance(found, torch.Tensor) or found.dim() != 3 or found.is_floating_point() or not found.numel():
        raise ValueError(f"routing trace:{file}: must hold a tensor of integers [ranks, T, K]")
    return found


@functools.lru_cache(maxsize=1)
def _load(file: str, changed: int) -> Any:
    """Loads a file once for all ranks. changed: its modification time, part of the cache key."""
    return torch.load(file, weights_only=True)
