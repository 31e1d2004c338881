"""The layouts of DeepEP's V1: counts and destinations of a rank's tokens."""

from __future__ import annotations

import torch

from megatron_ep.buffer.buffer import Buffer
from megatron_ep.deep_ep import transfers
from megatron_ep.deep_ep.config import NODE_RANKS
from megatron_ep.deep_ep.events import refuse
from megatron_ep.normal import api, expert_ids
from megatron_ep.normal.api import MAX_TOPK


def check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Raises ValueError unless topk_idx is a valid [T, K], and on the CPU for invalid ids."""
    if not isinstance(topk_idx, torch.Tensor):
        raise ValueError(f"topk_idx is a {type(topk_idx).__name__}, must be a tensor")
    api.check_ids([topk_idx])
    if topk_idx.device.type == "cpu":
        expert_ids.check(topk_idx, num_experts, allows_repeats=True)


def layout_of(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns tokens per rank int32 [W], per node of 8 ranks int32 [W / 8] or None, per expert int32 [E], and whether a
    token goes to a rank, bool [T, W]. topk_idx: [T, K]; a repeated expert counts twice, an invalid id does not
    count."""
    ids = topk_idx.long()
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)  # invalid ids count in an extra element
    experts = topk_idx.new_zeros(num_experts + 1, dtype=torch.int32)
    experts.scatter_add_(0, ids.flatten(), torch.ones_like(ids, dtype=torch.int32).flatten())
    ranks = ids.div(num_experts // num_ranks, rounding_mode="floor")
    goes = torch.zeros(len(ids), num_ranks + 1, dtype=torch.bool, device=ids.device).scatter_(1, ranks, True)
    goes = goes[:, :num_ranks].contiguous()
    nodes = None
    if num_ranks > NODE_RANKS:
        padded = torch.nn.functional.pad(goes, (0, -num_ranks % NODE_RANKS)).view(len(ids), -1, NODE_RANKS)
        nodes = padded.any(dim=2).sum(0, dtype=torch.int32)
    return goes.sum(0, dtype=torch.int32), nodes, experts[:num_experts], goes


def ids_of_ranks(is_token_in_rank: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Takes bool [T, W]; returns int64 [T, W], the first expert of each rank that a token goes to, or -1."""
    num_ranks = is_token_in_rank.shape[1]
    if num_ranks > MAX_TOPK:
        refuse("topk_idx", None, f"give topk_idx with more than {MAX_TOPK} ranks")
    first = torch.arange(0, num_experts, num_experts // num_ranks, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, first, -1)


def counts_of_all(buffer: Buffer, num_tokens_per_expert: torch.Tensor) -> list[int]:
    """Sums int32 [E] over ranks for this rank's experts: every rank dispatches a row of L numbers to each rank."""
    world, local_experts = buffer.topology.world_size, buffer.num_local_experts
    counts = num_tokens_per_expert.int().view(world, local_experts)
    ids = torch.arange(0, world * local_experts, local_experts, device=counts.device).view(world, 1)
    received, _ = transfers.dispatch_rows(buffer, counts.view(torch.float32), ids, None)
    return received.x.view(torch.int32).sum(0).tolist()
