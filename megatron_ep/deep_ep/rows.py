"""Rows in DeepEP's calls: a tensor, or a float8 tensor and its scales."""

from __future__ import annotations

import torch

from megatron_ep.deep_ep.transfers import Rows


def tensors_of(x: Rows) -> list[torch.Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


def device_of(x: Rows) -> torch.device:
    if not isinstance(tensors_of(x)[0], torch.Tensor):
        raise ValueError(f"x is a {type(x).__name__}, must be a tensor, or a tuple of one and its scales")
    return tensors_of(x)[0].device


def row_bytes(x: Rows, combined: torch.dtype = torch.bfloat16) -> int:
    """Returns the bytes of a row of x, or of one in dtype `combined` if that is larger."""
    values = tensors_of(x)[0]
    return values.shape[-1] * max(combined.itemsize, values.element_size())
