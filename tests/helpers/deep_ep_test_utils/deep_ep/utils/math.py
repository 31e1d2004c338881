"""`deep_ep.utils.math`: arithmetic, comparisons and casts for tests."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ep.reference import E4M3_MAX, SCALE_BLOCK

MIN_MAX = 1e-4  # lower bound of a block's largest magnitude


def ceil_div(count: int, share: int) -> int:
    return -(-count // share)


def align(count: int, alignment: int) -> int:
    return ceil_div(count, alignment) * alignment


def safe_div(dividend: float, divisor: float) -> float:
    """Divides, with 0 / 0 = 0."""
    return 0 if dividend == 0 and divisor == 0 else dividend / divisor


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Returns the difference 1 - 2 <x + 1, y + 1> / (|x + 1|^2 + |y + 1|^2) of two tensors, in float64."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts [T, H], H a multiple of 128, to float8_e4m3fn and float32 scales [T, H / 128]."""
    blocks = x.float().unflatten(-1, (-1, SCALE_BLOCK))
    largest = blocks.abs().amax(dim=-1).clamp(min=MIN_MAX)
    values = (blocks * (E4M3_MAX / largest).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return values.flatten(-2), largest / E4M3_MAX


def per_token_cast_back(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the values in bfloat16. scales: float32, or int32 with four exponents each, the first in the low byte."""
    if scales.dtype == torch.int32:
        bits = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
        exponents = (scales.unsqueeze(-1) >> bits & 0xFF).flatten(-2)  # biased exponents of powers of two
        scales = (exponents << 23).view(torch.float32)
    if x.numel() == 0:
        return x.to(torch.bfloat16)
    blocks = x.float().unflatten(-1, (-1, SCALE_BLOCK))
    return (blocks * scales.view(*blocks.shape[:-1], 1)).flatten(-2).to(torch.bfloat16)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Replaces each row by its distinct nonnegative values, which are < num_slots, in descending order, then -1."""
    there = torch.zeros(len(x), num_slots + 1, dtype=torch.bool, device=x.device)
    there.scatter_(1, torch.where(x < 0, num_slots, x).long(), True)
    slots = torch.arange(num_slots, device=x.device).expand(len(x), -1)
    values = torch.where(there[:, :num_slots], slots, -1).sort(dim=1, descending=True).values
    width = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :width] = values[:, :width].to(x.dtype)


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Returns scores [T, E] with zeros for the groups of E / num_groups experts that are not in group_idx [T, G]."""
    chosen = torch.zeros(len(scores), num_groups, dtype=torch.bool, device=scores.device).scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(x: torch.Tensor) -> int:
    """Returns the sum of a tensor's bytes, read as 4-byte integers."""
    return int(x.contiguous().view(-1).view(torch.int32).sum(dtype=torch.int64))


def count_bytes(*parts: Any) -> int:
    """Counts the bytes of tensors, in tuples and lists too; None counts nothing."""
    return sum(part.nbytes if isinstance(part, torch.Tensor) else count_bytes(*(part or ())) for part in parts)
