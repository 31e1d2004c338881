"""The layout of a dispatch, for its combine, their backward passes and cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ep.buffer.interface import Members, RowCounts
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.meeting.processes import OfOneProcess


class CountRequest(NamedTuple):
    """Settings of a dispatch that makes a layout. expert_capacity: 0 for none.

    has_fixed_sizes: with max_recv_tokens, tables have their largest size even if the host knows the counts; each table
        is a separate tensor.
    allows_repeats: whether a token may choose an expert twice; it has one row there all the same.
    keeps_source_tokens: whether the handle keeps the source token of each row.
    """

    expert_alignment: int
    expert_capacity: int
    max_recv_tokens: int | None
    has_fixed_sizes: bool = False
    allows_repeats: bool = False
    keeps_source_tokens: bool = False

    def members(self, topk_idx: torch.Tensor) -> Members:
        """Returns the kernel arguments of this request."""
        return {
            "index_bytes": topk_idx.element_size(),
            "expert_alignment": self.expert_alignment,
            "expert_capacity": self.expert_capacity,
            "allows_repeats": self.allows_repeats,
        }


class RankHandle:
    """One rank's part of a handle: the layout that notify makes, and tables that dispatch fills.

    counts: T; R, rows of the received tensors, including padding; tokens that the tables have room for.
    layout: int32, laid out by csrc/core/layout.h.
    tokens_per_expert: int64 [2, L], including padding: one row for the caller, one for the handle.
    made_on: stream of the dispatch, see Backend.current_stream.
    tables: int32 memory of the tables below that are not given; `starts` has their offsets.
    dst_rows: int32 [received, K]: output rows; with flat rows the local expert, or -1.
    rail_experts: int32 [rail, K].
    source_tokens: int32 [received], if requested: index of the token at its source.
    has_tables: whether a dispatch that fills the tables was launched.
    own_rows: rows of this rank that stay on it, if a plan of sequences made the layout; else None.
    """

    def __init__(
        self,
        topk: int,
        counts: RowCounts,
        layout: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        made_on: int,
        tables: torch.Tensor | None = None,
        starts: tuple[int, int, int | None] = (0, 0, None),
        dst_rows: torch.Tensor | None = None,
        rail_experts: torch.Tensor | None = None,
        source_tokens: torch.Tensor | None = None,
        has_tables: bool = False,
        own_rows: int | None = None,
    ):
        self.topk, self.counts, self.layout, self.tokens_per_expert = topk, counts, layout, tokens_per_expert
        self.made_on, self.tables, self.starts = made_on, tables, starts
        self._dst_rows, self._rail_experts, self._source_tokens = dst_rows, rail_experts, source_tokens
        self.has_tables, self.own_rows, self.has_given_counts = has_tables, own_rows, False
        # Of layout, dst_rows, rail_experts and source_tokens, 0 if the last is not kept; None: not looked up yet.
        self.addresses: tuple[int, int, int, int] | None = None

    @property
    def num_tokens(self) -> int:
        return self.counts.num_tokens

    @property
    def rows(self) -> int:
        return self.counts.rows

    def take_rows(self, rows: int) -> None:
        """Keeps only the first rows, once their number is known."""
        num_tokens, _, received, rail = self.counts
        self.counts = RowCounts(num_tokens, rows, received, rail)
        if self._dst_rows is not None:
            self._dst_rows = self._dst_rows[:rows]

    @property
    def dst_rows(self) -> torch.Tensor:
        if self._dst_rows is None:
            self._dst_rows = self._table(0, self.counts.received).view(-1, self.topk)
        return self._dst_rows

    @dst_rows.setter
    def dst_rows(self, table: torch.Tensor) -> None:
        self._dst_rows = table

    @property
    def rail_experts(self) -> torch.Tensor:
        if self._rail_experts is None:
            self._rail_experts = self._table(1, self.counts.rail).view(-1, self.topk)
        return self._rail_experts

    @property
    def source_tokens(self) -> torch.Tensor:
        if self._source_tokens is None:
            self._source_tokens = self._table(2, self.counts.received, 1)
        return self._source_tokens

    def _table(self, index: int, rows: int, columns: int | None = None) -> torch.Tensor:
        start = self.starts[index]
        assert self.tables is not None and start is not None
        return self.tables.narrow(0, start, rows * (columns or self.topk))

    def find_addresses(self) -> tuple[int, int, int, int]:
        """Looks up `addresses` and returns them."""
        if self.tables is None:
            tables = self.dst_rows.data_ptr(), self.rail_experts.data_ptr()
            source = 0 if self._source_tokens is None else self._source_tokens.data_ptr()
        else:
            first, (dst_rows, rail_experts, source_tokens) = self.tables.data_ptr(), self.starts
            tables = first + 4 * dst_rows, first + 4 * rail_experts
            source = 0 if source_tokens is None else first + 4 * source_tokens
        self.addresses = (self.layout.data_ptr(), *tables, source)
        return self.addresses

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors that launches use."""
        tensors = (self.layout, self.tables, self._dst_rows, self._rail_experts, self._source_tokens)
        return [tensor for tensor in tensors if tensor is not None]

    def relaid(self, rows: int, dst_rows: torch.Tensor | None = None) -> RankHandle:
        """Returns the same layout for `rows` rows. dst_rows: a new table to be filled; None keeps the filled one."""
        return RankHandle(
            self.topk,
            self.counts._replace(rows=rows),
            self.layout,
            self.tokens_per_expert,
            self.made_on,
            dst_rows=self.dst_rows if dst_rows is None else dst_rows,
            rail_experts=self.rail_experts,
            source_tokens=self.source_tokens,
            has_tables=dst_rows is None,
        )


def shapes_of(owner: object, *names: str) -> str:
    """Returns a repr with the shapes and dtypes of these attributes; the host would have to wait for their values."""
    said = []
    for name in names:
        if (value := getattr(owner, name)) is not None:
            tensors = value if isinstance(value, list) else [value]
            sizes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
            said.append(f"{name}: {sizes} {tensors[0].dtype}")
    return f"{type(owner).__name__}({', '.join(said)})"


class Handle(OfOneProcess):
    """The layout of one dispatch. Belongs to the buffer that made it, and cannot be used after that is closed.

    topk: K of the dispatch that made it.
    ranks: empty until that dispatch has made the layout.
    request, topk_idx: settings and ids [T, K] per rank of that dispatch; None and empty after it.
    is_flat: whether rows are flat, see `megatron_ep.dispatch`.
    one_hop: request of that dispatch if it went in one hop, as all calls with this handle then do; None: through rings.
    """

    def __init__(
        self,
        group: RankGroup,
        topk: int,
        ranks: list[RankHandle],
        request: CountRequest | None = None,
        topk_idx: Sequence[torch.Tensor] = (),
        is_flat: bool = False,
        one_hop: CountRequest | None = None,
    ):
        self.group, self.topk, self.ranks, self.is_flat, self.one_hop = group, topk, ranks, is_flat, one_hop
        self.request, self.topk_idx = request, topk_idx
        self.made_after_resets = group.resets

    def __repr__(self) -> str:
        sizes = "".join(f", {rank.num_tokens} tokens to {rank.rows} rows" for rank in self.ranks)
        return f"Handle({'flat' if self.is_flat else 'grouped'}, K = {self.topk}{sizes})"

    @property
    def cache_key(self) -> tuple[object, ...]:
        """The cache key of arguments: handles with equal keys fit the same tensors."""
        return (self.topk, self.is_flat, self.one_hop, *[(rank.num_tokens, rank.rows) for rank in self.ranks])

    @property
    def resets_since_made(self) -> int:
        """The buffer's resets since the handle was made. A reset restarts the numbers that identify layouts."""
        return self.group.resets - self.made_after_resets
