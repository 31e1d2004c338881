"""Converts the choices of Megatron's routers to the top-k ids and weights of a dispatch.

T tokens on this rank, E experts, K choices per token, TP ranks that share an expert.
"""

from __future__ import annotations

import torch


def choices_of(routing_map: torch.Tensor, probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts a map and probs [T, E] to ids [T, width], ascending and padded with -1, and weights [T, width], padded
    with 0. A token with more experts gets invalid ids, for which dispatch raises ValueError when it has the counts."""
    num_experts = routing_map.shape[1]
    order = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    chosen = (routing_map * order).topk(width, dim=1).values
    topk_idx = (num_experts - chosen).masked_fill(chosen == 0, -1).long()
    weights = probs.gather(1, topk_idx.clamp(min=0)).masked_fill(topk_idx < 0, 0)
    too_many = routing_map.sum(dim=1, keepdim=True) > width
    return topk_idx.masked_fill(too_many, num_experts), weights


def replicated(
    topk_idx: torch.Tensor, weights: torch.Tensor, tp_size: int, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts Megatron's expert ids [T, K] to ids in the group [T, K * TP], because each expert is on TP ranks. Keeps
    -1; other invalid ids stay invalid, and dispatch rejects them."""
    if tp_size == 1:
        return topk_idx, weights
    ep_rank = topk_idx.div(num_local_experts, rounding_mode="floor").unsqueeze(-1)
    tp_rank = torch.arange(tp_size, device=topk_idx.device)
    local_id = topk_idx.remainder(num_local_experts).unsqueeze(-1)
    replicas = (ep_rank * tp_size + tp_rank) * num_local_experts + local_id
    replicas = replicas.masked_fill(topk_idx.unsqueeze(-1) == -1, -1)
    weights = weights.unsqueeze(-1).expand(-1, -1, tp_size)
    return replicas.flatten(1), weights.flatten(1)
