"""Defines which rank computes which attention, and from that where every row of Q, K and V goes.

Documents are cut into shards. The rows of a shard are on its home rank, where the rest of a layer runs; its queries are
computed on its attention rank. That rank needs K and V of the document from its start to the shard's end; a row of K
and V is sent once to each rank that needs it. All ranks have the whole plan, so no counts are exchanged.

Rows are in the order (document, index) everywhere: at home, among the queries that a rank computes, and among the K and
V that it receives. No position depends on the order in which shards are passed or rows arrive.

Shapes: W ranks, S shards, T rows, N runs of rows, C destinations of a row, G segments of attention.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from megatron_ep.config import MAX_ROWS, require_int

MAX_RANKS = 1 << 13  # q_rows and kv_rows have W^2 entries

Position = TypeVar("Position", int, torch.Tensor)  # position of a row in a document
Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard:
    """A stretch of a document.

    document: number of the document, at least 0. index: position among the shards of the document, from 0.
    home_rank: rank that has its rows. attention_rank: rank that computes its queries. length: rows, may be 0.
    """

    document: int
    index: int
    home_rank: int
    attention_rank: int
    length: int


SHARD_FIELDS = tuple(field.name for field in fields(Shard))
SHARD_VALUES = operator.attrgetter(*SHARD_FIELDS)


class Routes(NamedTuple):
    """Destinations of the rows of one rank, for runs of rows that stay together. All int32.

    first_row, length: [N], the rows of each run, in order; the runs cover each row once.
    dst_rank: [N, C], ascending, -1 after the last. dst_row: [N, C], row there of the run's first row, -1 for none.
    """

    first_row: torch.Tensor
    length: torch.Tensor
    dst_rank: torch.Tensor
    dst_row: torch.Tensor

    def per_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns dst_rank and dst_row of every row: int32 [T, C], -1 for none."""
        run = torch.repeat_interleave(self.length)
        offset = torch.arange(len(run), dtype=torch.int32) - self.first_row[run]
        rank = self.dst_rank[run]
        return rank, torch.where(rank < 0, -1, self.dst_row[run] + offset.unsqueeze(1))


@dataclass(frozen=True, eq=False)
class RankTables:
    """One rank's part of a plan.

    num_rows: T, rows at home on this rank. num_q_rows, num_kv_rows: rows that arrive on this rank.
    q, kv: destinations of the rows at home, one for each row of q. C of kv is `SequencePlan.max_copies`.
    out: destinations of the num_q_rows of attention's output, one each; dQ takes the same way, and d(out) that of q.
    kv_grad: destinations of the num_kv_rows of dK and dV, one each; there the C copies are summed.

    A segment is a stretch of consecutive queries of a document. It attends to a stretch of keys, its context, that
    begins with the document and ends with the segment's last query: the bottom-right causal mask of varlen attention
    with more keys than queries.

    cu_seqlens_q, cu_seqlens_k: int32 [G + 1], starts of segments and of their contexts. max_seqlen_q, max_seqlen_k:
        lengths of the longest.
    context_rows: int64, received row of each row of the contexts; None if the contexts are the received rows in order.
        They are not if a rank computes several segments of a document, because their contexts overlap.
    """

    num_rows: int
    num_q_rows: int
    num_kv_rows: int
    q: Routes
    kv: Routes
    out: Routes
    kv_grad: Routes
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    context_rows: torch.Tensor | None


class Moves(NamedTuple):
    """Stretches of rows of all ranks, one entry for each destination. int64 [M]; the destinations of a stretch are
    consecutive, by rank."""

    src_rank: torch.Tensor
    src_row: torch.Tensor
    length: torch.Tensor
    dst_rank: torch.Tensor
    dst_row: torch.Tensor


class _Shards(NamedTuple):
    """Shards that are not empty, int64 [S], by (document, index). home_row, q_row: position of the first row."""

    document: torch.Tensor  # renumbered without gaps
    home_rank: torch.Tensor
    attention_rank: torch.Tensor
    length: torch.Tensor
    home_row: torch.Tensor
    q_row: torch.Tensor


class _Copies(NamedTuple):
    """Copies of K and V, int64, one entry for each rank that needs a shard, by (shard, rank)."""

    shard: torch.Tensor
    rank: torch.Tensor
    row: torch.Tensor  # first row on that rank
    column: torch.Tensor  # index among the copies of the shard


class _Segments(NamedTuple):
    """Segments of all ranks, int64 [G], by (document, index)."""

    rank: torch.Tensor
    q_rows: torch.Tensor
    kv_rows: torch.Tensor
    kv_row: torch.Tensor  # first received row of the context


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """The moves of all ranks, made by `build`; equal on every rank.

    world: W.
    q_rows, kv_rows: int64 [W, W], rows of Q, and of K and V, from each home rank (first index) to each rank.
    max_copies: C, the largest number of ranks that a row of K and V goes to.
    attention_pairs: int64 [W], (query, key) pairs of causal attention that each rank computes. A pair is 4 D operations
        of a query head forward, with D its width.
    """

    world: int
    q_rows: torch.Tensor
    kv_rows: torch.Tensor
    max_copies: int
    attention_pairs: torch.Tensor
    _shards: _Shards
    _copies: _Copies
    _segments: _Segments

    @classmethod
    def build(cls, shards: Iterable[Shard], world: int) -> SequencePlan:
        """Builds the plan.

        shards: shards of all ranks and documents, in any order. The indices in a document are 0, 1, 2 and so on.
        world: W.

        Raises ValueError that names the shard that is wrong.
        """
        require_int("world", world, 1, MAX_RANKS)
        ordered = _in_order(listed("shards", shards), world)
        copies = _copies(ordered, world)
        segments = _segments(ordered, copies, world)
        between = world * ordered.home_rank
        return cls(
            world=world,
            q_rows=_sums(between + ordered.attention_rank, ordered.length, world * world).view(world, world),
            kv_rows=_sums(between[copies.shard] + copies.rank, ordered.length[copies.shard], world * world).view(
                world, world
            ),
            max_copies=int(copies.column.max()) + 1 if len(copies.column) else 0,
            attention_pairs=_sums(
                segments.rank, causal_pairs(segments.kv_rows - segments.q_rows, segments.kv_rows), world
            ),
            _shards=ordered,
            _copies=copies,
            _segments=segments,
        )

    def q_moves(self) -> Moves:
        """Returns the moves of Q from home to attention ranks."""
        shards = self._shards
        return Moves(shards.home_rank, shards.home_row, shards.length, shards.attention_rank, shards.q_row)

    def kv_moves(self) -> Moves:
        """Returns the moves of K and V."""
        shards, copies = self._shards, self._copies
        of = copies.shard
        return Moves(shards.home_rank[of], shards.home_row[of], shards.length[of], copies.rank, copies.row)

    def digest(self) -> bytes:
        """Returns a digest by which ranks check that they have the same plan."""
        shards = torch.stack(self._shards).numpy().tobytes()
        return hashlib.blake2b(shards, digest_size=16).digest()

    def of_rank(self, rank: int) -> RankTables:
        """Returns the tables of a rank, on the CPU. Raises ValueError if rank is not in [0, W)."""
        require_int("rank", rank, 0, self.world - 1)
        shards, copies = self._shards, self._copies
        home = (shards.home_rank == rank).nonzero()[:, 0]
        here = (shards.attention_rank == rank).nonzero()[:, 0]
        received = (copies.rank == rank).nonzero()[:, 0]  # in the order of shards, which is that of received rows
        source = copies.shard[received]
        sent = (shards.home_rank[copies.shard] == rank).nonzero()[:, 0]
        run = torch.searchsorted(home, copies.shard[sent])
        kv = torch.full((2, len(home), self.max_copies), -1)
        kv[:, run, copies.column[sent]] = torch.stack([copies.rank[sent], copies.row[sent]])

        segments = _Segments(*(column[self._segments.rank == rank] for column in self._segments))
        cu_seqlens_k = _starts(segments.kv_rows)
        num_kv_rows = int(self.kv_rows[:, rank].sum())
        # Contexts of one document overlap; otherwise they are the received rows in order.
        context_rows = None
        if int(cu_seqlens_k[-1]) != num_kv_rows:
            moved = segments.kv_row - cu_seqlens_k[:-1]
            context_rows = torch.arange(int(cu_seqlens_k[-1])) + moved.repeat_interleave(segments.kv_rows)
        return RankTables(
            num_rows=int(self.q_rows[rank].sum()),
            num_q_rows=int(self.q_rows[:, rank].sum()),
            num_kv_rows=num_kv_rows,
            q=_single(shards.home_row[home], shards.length[home], shards.attention_rank[home], shards.q_row[home]),
            kv=_routes(shards.home_row[home], shards.length[home], kv[0], kv[1]),
            out=_single(shards.q_row[here], shards.length[here], shards.home_rank[here], shards.home_row[here]),
            kv_grad=_single(
                copies.row[received], shards.length[source], shards.home_rank[source], shards.home_row[source]
            ),
            cu_seqlens_q=_starts(segments.q_rows).int(),
            cu_seqlens_k=cu_seqlens_k.int(),
            max_seqlen_q=_largest(segments.q_rows),
            max_seqlen_k=_largest(segments.kv_rows),
            context_rows=context_rows,
        )


def shards_of_distca(plan: Iterable[Iterable[Any]]) -> list[Shard]:
    """Returns the shards of a plan from DistCA's scheduler: a list of documents, each a list of objects with the fields
    of its ShardInfo: rid (the home rank), dispatch_rid (the attention rank), logical_sid (the index), shard_len."""
    return [
        Shard(document, info.logical_sid, info.rid, info.dispatch_rid, info.shard_len)
        for document, infos in enumerate(plan)
        for info in infos
    ]


def listed(name: str, values: Iterable[Item]) -> list[Item]:
    """Returns the values, which may come from a generator, as a list. Raises ValueError if they are not iterable."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}, must be a list")
    return list(values)


def causal_pairs(first: Position, end: Position) -> Position:
    """Returns the (query, key) pairs of the queries in [first, end) of a document."""
    return (end - first) * (first + end + 1) // 2


def _in_order(shards: Sequence[Shard], world: int) -> _Shards:
    def refuse(i: int, why: str) -> NoReturn:
        raise ValueError(f"shards[{i}] is {shards[i]}, {why}")

    def refuse_first(wrong: torch.Tensor, why: str) -> None:
        if bool(wrong.any()):
            refuse(int(wrong.int().argmax()), why)

    rows = []
    for i, shard in enumerate(shards):
        if not isinstance(shard, Shard):
            refuse(i, "must be a Shard")
        row = SHARD_VALUES(shard)
        for name, value in zip(SHARD_FIELDS, row, strict=True):
            if type(value) is not int or not 0 <= value <= MAX_ROWS:
                refuse(i, f"whose {name} must be an int in [0, {MAX_ROWS}]")
        rows.append(row)
    numbers = torch.tensor(rows, dtype=torch.int64).view(-1, len(SHARD_FIELDS))
    document, index, home_rank, attention_rank, length = numbers.unbind(1)
    refuse_first(home_rank >= world, f"whose home_rank must be below world = {world}")
    refuse_first(attention_rank >= world, f"whose attention_rank must be below world = {world}")

    ids, document, counts = torch.unique(document, return_inverse=True, return_counts=True)
    count = counts[document]
    for i in (index >= count).nonzero()[:1, 0].tolist():
        refuse(i, f"whose index must be below {int(count[i])}, as many shards as its document has")
    key, order = (document * len(shards) + index).sort(stable=True)
    for i in (key[1:] == key[:-1]).nonzero()[:1, 0].tolist():
        refuse(int(order[i + 1]), f"which has the document and the index of shards[{int(order[i])}]")
    sums = _sums(document, length, len(ids))
    refuse_first(sums[document] > MAX_ROWS, f"whose document has more than {MAX_ROWS} rows")

    order = order[length[order] > 0]
    document, home_rank, attention_rank, length = (x[order] for x in (document, home_rank, attention_rank, length))
    _require_rows(home_rank, length, world, "shards whose home_rank is {rank} have {rows} rows")
    _require_rows(attention_rank, length, world, "shards whose attention_rank is {rank} have {rows} rows")
    return _Shards(
        document=torch.unique_consecutive(document, return_inverse=True)[1],
        home_rank=home_rank,
        attention_rank=attention_rank,
        length=length,
        home_row=_places(home_rank, length),
        q_row=_places(attention_rank, length),
    )


def _copies(shards: _Shards, world: int) -> _Copies:
    """Returns the copies of K and V: a rank needs a document's shards up to the last one whose queries it computes."""
    documents = len(torch.unique_consecutive(shards.document))
    position = torch.arange(len(shards.length))
    pairs, pair = torch.unique(shards.attention_rank * documents + shards.document, return_inverse=True)
    last = torch.zeros(len(pairs), dtype=torch.int64).scatter_reduce_(0, pair, position, "amax")
    first = torch.searchsorted(shards.document, shards.document[last])
    counts = last - first + 1
    shard = torch.arange(int(counts.sum())) + (first - _starts(counts)[:-1]).repeat_interleave(counts)
    rank = shards.attention_rank[last].repeat_interleave(counts)
    row = _places(rank, shards.length[shard])
    _require_rows(rank, shards.length[shard], world, "shards: rank {rank} would receive {rows} rows of K and V")
    order = shard.argsort(stable=True)
    shard, rank, row = shard[order], rank[order], row[order]
    column = torch.arange(len(shard)) - torch.searchsorted(shard, shard)
    return _Copies(shard, rank, row, column)


def _segments(shards: _Shards, copies: _Copies, world: int) -> _Segments:
    begins = torch.ones(len(shards.length), dtype=torch.bool)
    begins[1:] = (shards.document.diff() != 0) | (shards.attention_rank.diff() != 0)
    first = begins.nonzero()[:, 0]
    q_rows = _sums(begins.cumsum(0) - 1, shards.length, len(first))
    head = torch.searchsorted(shards.document, shards.document[first])  # the first shard of the document
    start = _starts(shards.length)
    kv_rows = start[first] + q_rows - start[head]
    # A segment's rank has a copy of the document's first shard, wherever the segment begins.
    rank = shards.attention_rank[first]
    kv_row = copies.row[torch.searchsorted(copies.shard * world + copies.rank, head * world + rank)]
    _require_rows(rank, kv_rows, world, "shards: the segments of rank {rank} have {rows} rows of context")
    return _Segments(rank, q_rows, kv_rows, kv_row)


def _require_rows(rank: torch.Tensor, rows: torch.Tensor, world: int, refusal: str) -> None:
    """Raises ValueError for the rank with most rows if it has too many. refusal: template with {rank} and {rows}."""
    most, where = _sums(rank, rows, world).max(0)
    if int(most) > MAX_ROWS:
        raise ValueError(f"{refusal.format(rank=int(where), rows=int(most))}, must be at most {MAX_ROWS}")


def _routes(first_row: torch.Tensor, length: torch.Tensor, dst_rank: torch.Tensor, dst_row: torch.Tensor) -> Routes:
    return Routes(first_row.int(), length.int(), dst_rank.int(), dst_row.int())


def _single(first_row: torch.Tensor, length: torch.Tensor, dst_rank: torch.Tensor, dst_row: torch.Tensor) -> Routes:
    return _routes(first_row, length, dst_rank.unsqueeze(1), dst_row.unsqueeze(1))


def _places(group: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Returns the start of each stretch if the stretches of a group are concatenated in the given order."""
    order = group.argsort(stable=True)
    start = _starts(length[order])[:-1]
    in_order = group[order]
    place = torch.empty_like(length)
    place[order] = start - start[torch.searchsorted(in_order, in_order)]
    return place


def _starts(length: torch.Tensor) -> torch.Tensor:
    """Returns the starts of concatenated stretches, and the end of the last one."""
    return torch.nn.functional.pad(length.cumsum(0), (1, 0))


def _sums(group: torch.Tensor, values: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.zeros(groups, dtype=torch.int64).index_add_(0, group, values)


def _largest(values: torch.Tensor) -> int:
    return int(values.max()) if len(values) else 0
