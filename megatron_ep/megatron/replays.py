"""Under recompute_modules=["moe"] a layer's backward pass begins with a replay of its forward pass: what that has found
out, the replay need not ask for again, and nobody reads what it would combine.

A replay is known by its input: the checkpoint has kept the same memory for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_ep as ep
from megatron_ep.normal.autograd import CombineFunction, WeightedCombineFunction


@dataclass
class Layout:
    """Layout of a forward pass without gradients. topk_idx: int64 [T, K * TP]; handle: once it has dispatched."""

    topk_idx: torch.Tensor
    handle: ep.Handle | None = None


class Replays:
    """The layouts of a layer's forward passes whose replay may come, as long as their inputs are kept."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[StorageWeakRef, int, torch.Size], Layout | None] = {}

    def note(self, x: torch.Tensor, topk_idx: torch.Tensor) -> Layout:
        """Creates the layout for the forward pass of x, which then fills in the handle."""
        for key in [key for key in self._layouts if key[0].expired()]:
            del self._layouts[key]
        layout, key = Layout(topk_idx), _memory(x)
        # If the same memory comes twice before a replay, it is unknown which of the two is repeated.
        self._layouts[key] = None if key in self._layouts else layout
        return layout

    def take(self, x: torch.Tensor) -> Layout | None:
        """Returns the layout of the forward pass that this pass of x repeats, if there is one."""
        return self._layouts.pop(_memory(x), None)


def _memory(x: torch.Tensor) -> tuple[StorageWeakRef, int, torch.Size]:
    return StorageWeakRef(x.untyped_storage()), int(x.storage_offset()), x.shape


def unread_combine(x: torch.Tensor, handle: ep.Handle, weights: torch.Tensor | None) -> torch.Tensor:
    """As `megatron_ep.combine`, whose backward pass it has, without the sums: [T, H] of zeros."""
    if weights is None:
        return _Unread.apply(handle, 1, x)[0]
    return _UnreadWeighted.apply(handle, 1, x, weights)[0]


def _nothing(handle: ep.Handle, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.new_zeros(()).expand(handle.ranks[0].num_tokens, x.shape[1]),)


class _Unread(CombineFunction):
    @staticmethod
    def forward(ctx: Any, handle: ep.Handle, num_ranks: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.num_ranks = handle, num_ranks
        return _nothing(handle, tensors[0])


class _UnreadWeighted(WeightedCombineFunction):
    @staticmethod
    def forward(ctx: Any, handle: ep.Handle, num_ranks: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.num_ranks = handle, num_ranks
        ctx.save_for_backward(*tensors)
        return _nothing(handle, tensors[0])


def recomputes(config: TransformerConfig) -> bool:
    """Whether the config has Megatron replay its MoE layers, and them alone."""
    return config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
