"""The tuples that are handles in DeepEP's V1. Their elements are created on access."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from megatron_ep.deep_ep.transfers import Routes
from megatron_ep.low_latency.api import LowLatency
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.meeting.processes import OfOneProcess

Kind = TypeVar("Kind")
UNKNOWN = -1  # value of elements that only other ranks know


def require_handle(handle: Any, kind: type[Kind], maker: str) -> Kind:
    """Returns the handle. Raises ValueError if it is of another kind. maker: what returns such handles."""
    if not isinstance(handle, kind):
        raise ValueError(f"handle is a {type(handle).__name__}, must be of {maker}")
    return handle


class _LazyTuple(OfOneProcess, tuple[Any, ...]):
    """A tuple of `LENGTH` elements, each created by `make(index)` on access."""

    LENGTH: int

    def __new__(cls, *_: Any) -> _LazyTuple:
        return super().__new__(cls, (None,) * cls.LENGTH)

    def make(self, index: int) -> Any:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self.make(i) for i in range(*index.indices(self.LENGTH)))
        return self.make(range(self.LENGTH)[index])

    def __iter__(self) -> Iterator[Any]:
        return (self.make(i) for i in range(self.LENGTH))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class NormalHandle(_LazyTuple):
    """Handle of a dispatch in normal mode, in the form for one node: rank_prefix_matrix int32 [W, W] (entry [i][j]:
    tokens of ranks 0..i for rank j in this rank's column, -1 elsewhere), channel_prefix_matrix and
    recv_channel_prefix_matrix int32 [W, C] (all -1), recv_src_idx int32 [R] (a row's token at its source),
    is_token_in_rank bool [T, W], send_head int32 [T, W] (0 for each rank that gets the token, -1 for others)."""

    LENGTH = 6

    def __init__(self, routes: Routes, is_token_in_rank: torch.Tensor, num_channels: int):
        self.routes = routes
        self._is_token_in_rank = is_token_in_rank
        self._num_channels = num_channels

    @functools.cached_property
    def _rank_prefix_matrix(self) -> torch.Tensor:
        counts = self.routes.rows_per_rank
        matrix = counts.new_full((len(counts), len(counts)), UNKNOWN)
        matrix[:, self.routes.group.ranks[0]] = counts.cumsum(0, dtype=torch.int32)
        return matrix

    def make(self, index: int) -> Any:
        if index == 0:
            return self._rank_prefix_matrix
        if index == 3:
            return self.routes.rank.source_tokens
        if index == 4:
            return self._is_token_in_rank
        if index == 5:
            return self._is_token_in_rank.int() - 1
        world = self.routes.group.topology.world_size
        return self.routes.rank.source_tokens.new_full((world, self._num_channels), UNKNOWN)


class LowLatencyTuple(_LazyTuple):
    """Handle of a low-latency dispatch: src_info int32 [L, M] (a row's token at its source; undefined after the last
    row), layout_range int64 [L, W] (first row of a source << 32 | its number of rows), T_max, H, E. M = W * T_max."""

    LENGTH = 5

    def __init__(
        self, low_latency: LowLatency, handle: LowLatencyHandle, topk_idx: torch.Tensor, max_tokens: int, hidden: int
    ):
        self.low_latency, self.handle = low_latency, handle
        self.topk_idx = topk_idx
        self.max_tokens, self.hidden = max_tokens, hidden
        self.combine_buffer: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the rows, [L, M, H]."""
        group = self.handle.group
        return group.num_local_experts, group.topology.world_size * self.max_tokens, self.hidden

    @functools.cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """src_info and layout_range, from the table of the rows of every token that arrived."""
        self.handle.check_received()
        local_experts, max_rows, _ = self.shape
        dst_rows, is_row = self.handle.rows_of_tokens(0)
        (world, max_tokens, _), device = dst_rows.shape, dst_rows.device
        # Choices without a row go to an extra element at the end, which is dropped.
        place = torch.where(is_row, dst_rows, local_experts * max_rows).long()
        source = torch.arange(world, device=device).view(world, 1, 1).expand_as(dst_rows)
        token = torch.arange(max_tokens, dtype=torch.int32, device=device).view(1, -1, 1).expand_as(dst_rows)
        src_info = dst_rows.new_zeros(local_experts * max_rows + 1).scatter_(0, place.flatten(), token.flatten())
        ring = (place // max_rows * world + source).flatten()
        ones = torch.ones_like(ring)
        counts = ring.new_zeros((local_experts + 1) * world).scatter_add_(0, ring, ones)[: local_experts * world]
        counts = counts.view(local_experts, world)
        begins = counts.cumsum(1) - counts
        return src_info[:-1].view(local_experts, max_rows), begins << 32 | counts

    def make(self, index: int) -> Any:
        if index < 2:
            return self._places[index]
        return (self.max_tokens, self.hidden, self.handle.group.config.num_experts)[index - 2]
