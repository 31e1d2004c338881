"""The specification: what dispatch and combine compute, for all ranks at once, in plain torch.

Lists have one entry per rank.
"""

from __future__ import annotations

import torch


def expert_rows(
    topk_idx: list[torch.Tensor], expert: int, expert_alignment: int = 1, expert_capacity: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The rows of an expert in order, as (token, k), and the rows of padding behind them.

    Tokens are counted over all ranks, so the order is (source rank, token).
    """
    token, k = (torch.cat(topk_idx) == expert).nonzero(as_tuple=True)
    if expert_capacity is None:
        return token, k, -len(token) % expert_alignment
    return token[:expert_capacity], k[:expert_capacity], max(0, expert_capacity - len(token))


def dispatch(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
    expert_alignment: int = 1,
    expert_capacity: int | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """x [T, H], topk_idx [T, K], topk_weights [T, K] to x [R, H], probs [R], tokens_per_expert int64 [L].

    Expert e lives on rank e // L. A rank's rows are grouped by expert, each padded with zeros to a multiple of
    expert_alignment, or cut or padded to expert_capacity. With max_recv_tokens it is the first so many rows of this
    that arrive. Scales of float8 rows arrive as their rows do.
    """
    local_experts = num_experts // len(x)
    all_x, all_weights = torch.cat(x), torch.cat(topk_weights)
    out_x, out_probs, out_counts = [], [], []
    for rank in range(len(x)):
        xs, probs, counts = [], [], []
        for expert in range(rank * local_experts, (rank + 1) * local_experts):
            token, k, padding = expert_rows(topk_idx, expert, expert_alignment, expert_capacity)
            xs += [all_x[token], all_x.new_zeros(padding, all_x.shape[1])]
            probs += [all_weights[token, k], all_weights.new_zeros(padding)]
            counts.append(len(token) + padding)
        out_x.append(torch.cat(xs))
        out_probs.append(torch.cat(probs))
        out_counts.append(torch.tensor(counts))
    return out_x, out_probs, out_counts


def combine(
    expert_out: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    num_experts: int,
    expert_alignment: int = 1,
    expert_capacity: int | None = None,
    weights: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """expert_out [R, H], rows as dispatch gave them, to the sum of each token's rows, [T, H].

    weights: [R], float32 (float64 for float64): each row is multiplied by its own, in their dtype.
    Sums in float64. The kernels sum in float32 and round to the dtype of x wherever a partial sum travels: per rank,
    then per node.
    """
    all_out = torch.cat(expert_out)
    terms = all_out if weights is None else all_out * torch.cat(weights).unsqueeze(1)
    num_tokens = [idx.shape[0] for idx in topk_idx]
    sums = all_out.new_zeros(sum(num_tokens), all_out.shape[1], dtype=torch.float64)
    first = 0
    for expert in range(num_experts):
        token, _, padding = expert_rows(topk_idx, expert, expert_alignment, expert_capacity)
        sums.index_add_(0, token, terms[first : first + len(token)].to(torch.float64))
        first += len(token) + padding
    return list(sums.to(all_out.dtype).split(num_tokens))
