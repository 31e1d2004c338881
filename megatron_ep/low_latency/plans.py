"""Low-latency calls whose arguments were checked.

A plan is a call but for its addresses: the same whenever the arguments look the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ep import _C
from megatron_ep.low_latency.rows import Float8

Counters = Mapping[str, Sequence[torch.Tensor]]  # the callers', one a rank: recv_rows, recv_wait_ns


@dataclass(frozen=True)
class DispatchPlan:
    """Everything about a dispatch except tensor addresses. See `LowLatencyCalls.plan`.

    num_tokens: of each rank of this process. rows: that each has room for. shape: of these rows. dtype: of what
    arrives. offsets: where the parts of a handle's layout begin.
    """

    topk: int
    masked: bool
    expert_alignment: int
    num_tokens: tuple[int, ...]
    rows: int
    shape: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    float8: Float8 | None
    offsets: Mapping[str, int]
    format: _C.RowFormat
    options: _C.LowLatencyOptions

    @functools.cached_property
    def looks(self) -> tuple[object, ...]:
        """Dispatches with the same ones fit the same rows."""
        return (self.topk, self.masked, self.rows, self.num_tokens)


@dataclass(frozen=True)
class CombinePlan:
    """Everything about a combine except tensor addresses. dtype: of x, as the extension numbers it."""

    sum_at_expert: bool
    format: _C.RowFormat
    options: _C.LowLatencyOptions
    dtype: int


class DispatchArguments(NamedTuple):
    """Besides the tensors that may get gradients. Lists have one entry per rank of this process."""

    plan: DispatchPlan
    ids: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor] | None = None
    counters: Counters | None = None


class CombineArguments(NamedTuple):
    """Likewise."""

    plan: CombinePlan
    out: Sequence[torch.Tensor] | None = None
    counters: Counters | None = None
