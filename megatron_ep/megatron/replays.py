"""Recompute of activations: a layer's backward pass begins with a replay of its forward pass. The replay reuses the
layout of the forward pass; and if only the layer is replayed, its combine is skipped, because the result is not used.

A replay is identified by its checkpoint: a `torch.autograd.Function` of Megatron, Transformer Engine or torch, whose
ctx is the same in the forward and the backward pass, and lives as long as a replay may come.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import FunctionCtx

import megatron_ep as ep
from megatron_ep.normal.autograd import CombineFunction, WeightedCombineFunction


@dataclass
class Layout:
    """Layout of a forward pass that may be replayed.

    topk_idx: int64 [T, K * TP]. handle: None until the pass has dispatched. is_layers_own: whether the checkpoint is
        that of the layer, whose output is the combined tokens, not one of more layers.
    """

    topk_idx: torch.Tensor
    is_layers_own: bool
    handle: ep.Handle | None = None


class Replays:
    """The layouts of a layer's forward passes whose replay may come."""

    def __init__(self) -> None:
        self._layouts: WeakKeyDictionary[FunctionCtx, list[Layout]] = WeakKeyDictionary()

    def layout(self, topk_idx: torch.Tensor) -> Layout | None:
        """Returns a new layout in a checkpoint's forward pass, the same one in its replay, and None elsewhere.

        A checkpoint that calls the layer more than once replays these calls in the same order.
        """
        frame: FrameType | None = sys._getframe(1)
        is_layers_own = True
        while frame is not None:
            if frame.f_code.co_name in ("forward", "backward"):
                ctx = frame.f_locals.get("ctx")
                if isinstance(ctx, FunctionCtx):
                    break
                is_layers_own = False
            frame = frame.f_back
        else:
            return None
        layouts = self._layouts.setdefault(ctx, [])
        if frame.f_code.co_name == "backward":
            return layouts.pop(0) if layouts else None
        layouts.append(Layout(topk_idx, is_layers_own))
        return layouts[-1]


def unread_combine(
    x: torch.Tensor, handle: ep.Handle, weights: torch.Tensor | None, *, backward_dtype: torch.dtype | None
) -> torch.Tensor:
    """Returns zeros [T, H] with the backward pass of `megatron_ep.combine`."""

    def nothing(rows: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor]:
        return (rows.new_zeros(()).expand(handle.ranks[0].num_tokens, rows.shape[1]),)

    if weights is None:
        return CombineFunction.apply(handle, nothing, backward_dtype, x)[0]
    return WeightedCombineFunction.apply(handle, nothing, x, weights)[0]
