"""`deep_ep.utils.refs`: reference dispatch and combine, over torch.distributed's all-to-all."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron_ep.deep_ep.transfers import Rows, tensors_of

from .envs import get_global_seed

PRIME = 131071


def dispatch(
    x: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Rows, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Returns flat rows of the default group, by (source rank, token): x [R, H] (and scales), local ids [R, K] or -1,
    all weights [R, K], int32 [R] source rank * num_max_tokens_per_rank + token, and the rows from each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local_experts = num_experts // world
    rank_of_choice = topk_idx.div(local_experts, rounding_mode="floor")
    token = [(rank_of_choice == other).any(dim=1).nonzero()[:, 0] for other in range(world)]
    sent, order = [len(part) for part in token], torch.cat(token)
    counts = torch.tensor(sent, dtype=torch.int64, device=topk_idx.device)
    received = _exchange(counts, [1] * world, [1] * world).tolist()
    number = (order + rank * num_max_tokens_per_rank).int()
    parts = [_exchange(part[order], sent, received) for part in (*tensors_of(x), topk_idx, topk_weights)]
    *rows, ids, weights = parts
    ids = ids - rank * local_experts
    ids = ids.masked_fill((ids < 0) | (ids >= local_experts), -1)
    out: Rows = (rows[0], rows[1]) if isinstance(x, tuple) else rows[0]
    return out, ids, weights, _exchange(number, sent, received), received


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Exchanges rows of any dtype as bytes, through the host if the group's backend is gloo."""
    lead = rows.contiguous().view(len(rows), -1)
    bytes_of_rows = lead.view(torch.uint8) if lead.numel() else lead.new_empty(0, lead.shape[1], dtype=torch.uint8)
    width = lead.shape[1] * lead.element_size()
    device = torch.device("cpu") if dist.get_backend() == "gloo" else rows.device
    out = torch.empty(sum(received), width, dtype=torch.uint8, device=device)
    dist.all_to_all_single(out, bytes_of_rows.reshape(len(rows), width).to(device), received, sent)
    return out.to(rows.device).view(rows.dtype).view(sum(received), *rows.shape[1:])


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """Returns bfloat16 [R, K, H], computed from the indices of tokens [R]: equal on all ranks for the same token."""
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    device = src_token_global_idx.device
    choice = src_token_global_idx.unsqueeze(1) * num_topk + torch.arange(num_topk, device=device)
    share = ((choice * PRIME % most).float() + 1) / most
    column = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    return torch.sin(share.unsqueeze(2) * column + math.sin(get_global_seed())).to(torch.bfloat16)


def ordered_accumulate(data: torch.Tensor, initial_value: torch.Tensor | None = None) -> torch.Tensor:
    """Sums [T, K, H] over k, in order and in float32, starting with initial_value [T, H], and rounds once."""
    total = torch.zeros_like(data[:, 0], dtype=torch.float32) if initial_value is None else initial_value.float()
    for k in range(data.shape[1]):
        total = total + data[:, k]
    return total.to(data.dtype)


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """Returns the sums [T, H] of y [T, K, H], which is 0 where topk_idx is -1. reduce_in_local, reduce_in_scaleup: rows
    of a rank, or of a node, are summed and rounded first, and their sum takes the place of their last k."""
    local_experts = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _sum_groups(y, topk_idx.div(local_experts, rounding_mode="floor"))
    if reduce_in_scaleup:
        y = _sum_groups(y, topk_idx.div(local_experts * num_scaleup_ranks, rounding_mode="floor"))
    biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
    start = None
    for part in biases:
        start = part.float() if start is None else start + part.float()
    return ordered_accumulate(y, start)


def _sum_groups(y: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Returns the sum of each group at its last k, zeros elsewhere. y: [T, K, H], group: [T, K]."""
    sums = torch.zeros_like(y)
    for k in range(y.shape[1]):
        is_last = ~(group[:, k + 1 :] == group[:, k : k + 1]).any(dim=1, keepdim=True)
        total = torch.zeros_like(y[:, 0], dtype=torch.float32)
        for earlier in range(k + 1):
            is_same = (group[:, earlier] == group[:, k]).unsqueeze(1)
            total = torch.where(is_same, total + y[:, earlier], total)
        sums[:, k] = torch.where(is_last, total, 0).to(y.dtype)
    return sums
