"""A plan as handles of the normal mode, whose dispatch and combine move the rows: its roles see tokens, and a rank that
a row goes to as that rank's first expert. What a notify would have found out follows from the plan.

As one token a row has at most MAX_COPIES destinations. A row with more is several tokens: itself, and spare ones
behind the last row of its rank. Each has the ranks of whole nodes, unless a node has more ranks than that, so that a
row still crosses the network once a node.

Shapes: W ranks, M moves.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ep.buffer.interface import RankHandle
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import MAX_TOPK, Topology
from megatron_ep.normal.handle import Handle
from megatron_ep.sequences.plan import Moves, SequencePlan

MAX_COPIES = MAX_TOPK

# What a channel has to do for a row that leaves its rank, over what it has to do for one that stays: a move finds out
# where that goes, and copies of it are summed like others.
MOVED, COPIED = 16, 2


@dataclass
class SpareTokens:
    """Tokens from first_token on that are copies of `length` rows from first_row on."""

    first_token: int
    first_row: int
    length: int


@dataclass
class PlanHandles:
    """A handle for each way that rows go.

    spare_tokens: of kv, of each rank of this process, in the order of a row's destinations.
    has_partial_sums: whether some gradients of K and V are summed by another node, or by a spare token, before they
        are summed here. The same on all ranks.
    """

    q: Handle  # Q, and the gradient of attention's output
    out: Handle  # attention's output, and the gradient of Q
    kv: Handle  # K and V; its combine sums their gradients
    spare_tokens: list[list[SpareTokens]]
    has_partial_sums: bool

    def widens_sums(self, dtype: torch.dtype) -> bool:
        """Whether gradients of this type are sent in float32: partial sums travel in the rows' own type."""
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
    """Moves of a plan as those of tokens: int64 [M].

    token: the first of each move. column: which of a token's destinations. tokens: int64 [W], of each rank.
    leaving: see csrc/core/planned_layout.h.
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
        """int32 [M, 6], as csrc/core/planned_layout.h has it."""
        moves = self.moves
        columns = (moves.src_rank, self.token, moves.length, self.column, moves.dst_rank, moves.dst_row)
        return torch.stack(columns, dim=1).int()

    def own_rows(self) -> torch.Tensor:
        """int64 [W], rows of each rank that stay there."""
        moves = self.moves
        stays = moves.src_rank == moves.dst_rank
        return torch.zeros_like(self.tokens).index_add_(0, moves.src_rank[stays], moves.length[stays])


@dataclass
class Ways:
    """What `PlanHandles` are made of, of all ranks."""

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
    """rows: int64 [W], of each rank, before it gets spare tokens."""
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
    """How many of a row's destinations, which are in order, go to each of its tokens."""
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
    """name: by which ranks know that they mean the same."""
    topk, table, tokens, own_rows = way.topk, way.table(), way.tokens.int(), way.own_rows()
    epoch = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little") or 1
    made_on, ranks = group.live_backend().current_stream(), []
    for rank in group.ranks:
        num_tokens = int(tokens[rank])
        layout = torch.empty(group.heap.layout_size(num_tokens, topk), dtype=torch.int32)
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
                num_tokens=num_tokens,
                layout=layout,
                rows=totals.received_rows,
                counts=layout,  # which nobody asks for
                dst_rows=dst_rows,
                rail_experts=rail_experts,
                rail_rows=totals.rail_rows,
                made_on=made_on,
                own_rows=int(own_rows[rank]),
            )
        )
    return Handle(group, topk, ranks)
