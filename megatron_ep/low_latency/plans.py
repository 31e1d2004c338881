"""Plans of low-latency calls with checked arguments.

A plan is everything about a call except tensor addresses. It is cached by shapes, dtypes and options of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ep import _C
from megatron_ep.low_latency.rows import Float8

Counters = Mapping[str, Sequence[torch.Tensor]]  # recv_rows and recv_wait_ns of the caller, one tensor per rank


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Everything about a dispatch except tensor addresses. See `LowLatencyCalls.plan`.

    num_tokens: tokens of each rank of this process. rows, shape: number and shape of the rows that each rank has room
    for, without H; out_shape: with H. dtype: dtype of received rows. offsets: offsets of the parts of a handle's
    layout, in int32.
    """

    topk: int
    masked: bool
    expert_alignment: int
    num_tokens: tuple[int, ...]
    rows: int
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    float8: Float8 | None
    offsets: Mapping[str, int]
    call: _C.Call


@dataclass(frozen=True)
class CombinePlan:
    """Everything about a combine except tensor addresses."""

    sum_at_expert: bool
    call: _C.Call


class DispatchArguments(NamedTuple):
    """The arguments of a dispatch without gradients. Lists have one entry per rank of this process."""

    plan: DispatchPlan
    ids: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor] | None = None
    counters: Counters | None = None


class CombineArguments(NamedTuple):
    """The arguments of a combine without gradients."""

    plan: CombinePlan
    out: Sequence[torch.Tensor] | None = None
    counters: Counters | None = None
