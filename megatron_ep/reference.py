"""The specification: what dispatch and combine compute, for all ranks at once, in plain torch. Lists have one entry per rank."""

from __future__ import annotations

import torch


def expert_rows(topk_idx: list[torch.Tensor], num_experts: int) -> list[list[tuple[int, int, int]]]:
    """For each expert its rows in order, each as (source rank, token, k)."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(num_experts)]
    for rank, idx in enumerate(topk_idx):
        for token, experts in enumerate(idx.tolist()):
            for k, expert in enumerate(experts):
                if expert >= 0:
                    rows[expert].append((rank, token, k))
    return rows


def dispatch(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
    expert_alignment: int = 1,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """x [T, H], topk_idx [T, K], topk_weights [T, K] to x [R, H], probs [R], tokens_per_expert int64 [L].

    Expert e lives on rank e // L. A rank's rows are grouped by expert, padded with zeros to a multiple of expert_alignment.
    """
    rows = expert_rows(topk_idx, num_experts)
    local_experts = num_experts // len(x)
    out_x, out_probs, out_counts = [], [], []
    for rank in range(len(x)):
        counts = []
        xs, probs = [x[0].new_empty(0, x[0].shape[1])], [topk_weights[0].new_empty(0)]
        for expert in range(rank * local_experts, (rank + 1) * local_experts):
            for source, token, k in rows[expert]:
                xs.append(x[source][token : token + 1])
                probs.append(topk_weights[source][token, k : k + 1])
            padding = -len(rows[expert]) % expert_alignment
            xs.append(x[0].new_zeros(padding, x[0].shape[1]))
            probs.append(topk_weights[0].new_zeros(padding))
            counts.append(len(rows[expert]) + padding)
        out_x.append(torch.cat(xs))
        out_probs.append(torch.cat(probs))
        out_counts.append(torch.tensor(counts))
    return out_x, out_probs, out_counts


def combine(
    expert_out: list[torch.Tensor], topk_idx: list[torch.Tensor], num_experts: int, expert_alignment: int = 1
) -> list[torch.Tensor]:
    """expert_out [R, H], rows as dispatch gave them, to the sum of each token's rows, [T, H].

    Sums in float64. The kernels sum in float32 and round to the dtype of x wherever a partial sum travels: per rank, then per node.
    """
    local_experts = num_experts // len(expert_out)
    sums = [x.new_zeros(idx.shape[0], x.shape[1], dtype=torch.float64) for x, idx in zip(expert_out, topk_idx, strict=True)]
    next_row = [0] * len(expert_out)
    for expert, rows in enumerate(expert_rows(topk_idx, num_experts)):
        rank = expert // local_experts
        for source, token, _ in rows:
            sums[source][token] += expert_out[rank][next_row[rank]].to(torch.float64)
            next_row[rank] += 1
        next_row[rank] += -len(rows) % expert_alignment
    return [total.to(x.dtype) for total, x in zip(sums, expert_out, strict=True)]
