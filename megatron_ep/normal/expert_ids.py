"""Checks expert ids: those of a token must be distinct and in [0, E), or -1 for no expert."""

from __future__ import annotations

import torch


def first_invalid(topk_idx: torch.Tensor, num_experts: int, allows_repeats: bool = False) -> int | None:
    """Returns the first token of topk_idx [T, K] with invalid ids, or None. Waits for a tensor on a GPU."""
    ordered = topk_idx.sort(dim=1).values
    repeated = (ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)
    bad = ((topk_idx < -1) | (topk_idx >= num_experts)).any(dim=1)
    if not allows_repeats:
        bad |= repeated.any(dim=1)
    return int(bad.nonzero()[0]) if bad.any() else None


def check(topk_idx: torch.Tensor, num_experts: int, rank: int | None = None, allows_repeats: bool = False) -> None:
    """Raises ValueError for the first token with invalid ids. rank: see `refusal`."""
    token = first_invalid(topk_idx, num_experts, allows_repeats)
    if token is not None:
        raise refusal(topk_idx, token, num_experts, rank, allows_repeats)


def refusal(
    topk_idx: torch.Tensor, token: int, num_experts: int, rank: int | None, allows_repeats: bool = False
) -> ValueError:
    """Returns the error for a token with invalid ids. rank: rank of topk_idx, if the caller passed those of several."""
    where = "" if rank is None else f" of rank {rank}"
    must = "must hold ids in" if allows_repeats else "must hold distinct ids in"
    ids = topk_idx[token].tolist()
    return ValueError(f"topk_idx{where} is {ids} at token {token}, {must} [0, {num_experts}), or -1 for no expert")
