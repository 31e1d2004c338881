"""Turns a plan into handles of the normal mode, whose dispatch and combine move the rows. A row is a token, and its
destination rank is that rank's first expert. The layout that a notify would exchange follows from the plan.

A token has at most MAX_COPIES destinations. A row with more becomes several tokens: itself, and spare ones after the
last row of its rank. Each has the ranks of whole nodes, unless a node has more than MAX_COPIES ranks, so that a row
crosses the network once per node.

Shapes: W ranks, M moves.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ep.buffer.interface import RowCounts
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import MAX_TOPK, Topology
from megatron_ep.normal.handle import Handle, RankHandle
from megatron_ep.sequences.plan import Moves, SequencePlan

MAX_COPIES = MAX_TOPK

# The work of a channel for a row that leaves its rank relative to one that stays: for rows with one destination, and
# for copied rows, whose gradients are summed even where they stay.
MOVED, COPIED = 16, 2


@dataclass
class SpareTokens:
    """`length` tokens from first_token on, which are copies of the rows from first_row on."""

    first_token: int
    first_row: int
    length: int


@dataclass
class PlanHandles:
    """The handles of a plan, one for each direction of its rows.

    spare_tokens: spare tokens of kv for each rank of this process, in the order of a row's destinations.
    has_partial_sums: whether some gradients of K and V are summed by another node, or by a spare token, before they
        are summed here; equal on all ranks.
    """

    q: Handle  # Q, and the gradient of attention's output
    out: Handle  # attention's output, and the gradient of Q
    kv: Handle  # K and V; its combine sums their gradients
    spare_tokens: list[list[SpareTokens]]
    has_partial_sums: bool

    def widens_sums(self, dtype: torch.dtype) -> bool:
        """Returns whether gradients of this dtype are sent in float32, because partial sums have the dtype of rows."""
        return self.has_partial_sums and dtype.itemsize == 2


def handles_of(plan: SequencePlan, group: RankGroup) -> PlanHandles:
    ways, digest = ways_of(plan, group.topology), plan.digest()
    return PlanHandles(
        q=_handle(group, digest + b"q", ways.q),
        out=_handle(group, digest + b"out", ways.out),
        kv=_handle(group, digest + b"kv", ways.kv),
        spare_tokens=[ways.spare_tokens[rank] for rank in group.ranks],
        has_partial_sums=ways.has_partial_sums,
    )


@dataclass
class Way:
    """The moves of a plan as moves of tokens.

    token, column: int64 [M], first token of each move, and the index of its destination among those of the token.
    tokens: int64 [W], tokens of each rank. leaving: see csrc/core/planned_layout.h.
    """

    moves: Moves
    token: torch.Tensor
    column: torch.Tensor
    tokens: torch.Tensor
    leaving: int

    @property
    def topk(self) -> int:
        return int(self.column.max()) + 1 if len(self.column) else 1

    def table(self) -> torch.Tensor:
        """Returns the moves as int32 [M, 6], in the columns of csrc/core/planned_layout.h."""
        moves = self.moves
        columns = (moves.src_rank, self.token, moves.length, self.column, moves.dst_rank, moves.dst_row)
        return torch.stack(columns, dim=1).int()

    def own_rows(self) -> torch.Tensor:
        """Returns int64 [W], the rows of each rank that stay there."""
        moves = self.moves
        stays = moves.src_rank == moves.dst_rank
        return torch.zeros_like(self.tokens).index_add_(0, moves.src_rank[stays], moves.length[stays])


@dataclass
class Ways:
    """What `PlanHandles` are made from, for all ranks."""

    q: Way
    out: Way
    kv: Way
    spare_tokens: list[list[SpareTokens]]
    has_partial_sums: bool


def ways_of(plan: SequencePlan, topology: Topology) -> Ways:
    q = plan.q_moves()
    out = Moves(q.dst_rank, q.dst_row, q.length, q.src_rank, q.src_row)
    rows, q_rows, first = plan.q_rows.sum(1), plan.q_rows.sum(0), torch.zeros_like(q.src_row)
    kv, spare_tokens = _as_tokens(plan.kv_moves(), rows, topology.ranks_per_node)
    is_cut = topology.nodes > 1 or any(spare_tokens)
    return Ways(
        q=Way(q, q.src_row, first, rows, MOVED),
        out=Way(out, out.src_row, first, q_rows, MOVED),
        kv=kv,
        spare_tokens=spare_tokens,
        has_partial_sums=is_cut and plan.max_copies > 1,
    )


def _as_tokens(moves: Moves, rows: torch.Tensor, ranks_per_node: int) -> tuple[Way, list[list[SpareTokens]]]:
    """Returns moves of rows as moves of tokens, and the spare tokens of each rank. rows: int64 [W], rows per rank."""
    begins = torch.ones(len(moves.src_row), dtype=torch.bool)
    begins[1:] = (moves.src_rank.diff() != 0) | (moves.src_row.diff() != 0)
    first = begins.nonzero()[:, 0]
    count = torch.diff(first, append=torch.tensor([len(begins)]))
    token, tokens = moves.src_row.clone(), rows.clone()
    column = torch.arange(len(begins)) - first.repeat_interleave(count)
    spare_tokens: list[list[SpareTokens]] = [[] for _ in rows]
    for stretch in (count > MAX_COPIES).nonzero()[:, 0].tolist():
        at = int(first[stretch])
        rank, row, length = (int(part[at]) for part in (moves.src_rank, moves.src_row, moves.length))
        ranks = moves.dst_rank[at : at + int(count[stretch])].tolist()
        for number, size in enumerate(tokens_of_row(ranks, ranks_per_node)):
            column[at : at + size] = torch.arange(size)
            if number:
                token[at : at + size] = tokens[rank]
                spare_tokens[rank].append(SpareTokens(int(tokens[rank]), row, length))
                tokens[rank] += length
            at += size
    return Way(moves, token, column, tokens, COPIED), spare_tokens


def tokens_of_row(ranks: Sequence[int], ranks_per_node: int) -> Iterator[int]:
    """Yields the number of destinations of each token of a row. ranks: destinations of the row, ascending."""
    size = 0
    for _, members in itertools.groupby(ranks, lambda rank: rank // ranks_per_node):
        left = len(list(members))
        if size + left > MAX_COPIES and size:
            yield size
            size = 0
        while left > MAX_COPIES:
            yield MAX_COPIES
            left -= MAX_COPIES
        size += left
    yield size


def _handle(group: RankGroup, name: bytes, way: Way) -> Handle:
    """Returns the handle of a way. name: identifies plan and direction, so that ranks notice if they differ."""
    topk, table, tokens, own_rows = way.topk, way.table(), way.tokens.int(), way.own_rows()
    epoch = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little") or 1
    made_on, ranks = group.live_backend().current_stream(), []
    for rank in group.ranks:
        num_tokens = int(tokens[rank])
        layout = torch.empty(group.heap.layout(num_tokens, topk)["size"], dtype=torch.int32)
        totals = group.heap.lay_out(
            rank=rank,
            topk=topk,
            moves=table.data_ptr(),
            count=len(table),
            tokens=tokens.data_ptr(),
            epoch=epoch,
            leaving=way.leaving,
            layout=layout.data_ptr(),
        )
        dst_rows, rail_experts = (
            torch.empty(count, topk, dtype=torch.int32, device=group.device)
            for count in (totals.received_rows, totals.rail_rows)
        )
        layout = layout.to(group.device)
        ranks.append(
            RankHandle(
                topk,
                RowCounts(num_tokens, totals.received_rows, totals.received_rows, totals.rail_rows),
                layout,
                layout,  # a placeholder: a plan's counts are not used
                made_on,
                dst_rows=dst_rows,
                rail_experts=rail_experts,
                own_rows=int(own_rows[rank]),
            )
        )
    return Handle(group, topk, ranks)
