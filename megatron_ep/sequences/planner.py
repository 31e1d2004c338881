"""Decides which rank computes which attention, so that the work of ranks is equal and few rows are moved.

At first every rank computes its own rows. Ranks above the mean give work away, the one with most first, from its
longest shards; the rank with least work takes it. A rank gives the end of a shard, cut at a multiple of a block,
because the last queries of a document have the most keys: few of them are much work. Taking never lifts a rank above
the mean, and equal shards give equal plans.

For 10,000 documents on 512 ranks `balance` takes 70 ms of a core, and `SequencePlan.build` of its result 20 ms (an AMD
EPYC, two cores, busy with other work); either takes up to 150 ms more if Python collects garbage meanwhile.
`megatron-ep sequences LENGTHS --ranks 512` prints both.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from megatron_ep.config import MAX_ROWS, require_int
from megatron_ep.sequences.plan import MAX_RANKS, SequencePlan, Shard, causal_pairs, listed

BLOCK = 128  # rows of a tile of common attention kernels: other cuts leave tiles partly empty
MAX_BYTES = (1 << 63) - 1


class RowBytes(NamedTuple):
    """The bytes of a row of Q, of K and V together, and of attention's output."""

    q: int
    kv: int
    out: int


ONE_EACH = RowBytes(1, 1, 1)  # counts rows


def cut_evenly(lengths: Iterable[int], world: int) -> list[Shard]:
    """Cuts concatenated documents of these lengths into W stretches with equal numbers of rows (the last may have fewer
    or none). Rank r is home and attention rank of stretch r.

    Raises ValueError that names the length that is wrong.
    """
    require_int("world", world, 1, MAX_RANKS)
    lengths = listed("lengths", lengths)
    for i, length in enumerate(lengths):
        require_int(f"lengths[{i}]", length, 0, MAX_ROWS)
    rows_per_rank, shards, row = -(-sum(lengths) // world), [], 0
    for document, length in enumerate(lengths):
        end, index = row + length, 0
        while row < end:
            rank = row // rows_per_rank
            rows = min(end, (rank + 1) * rows_per_rank) - row
            shards.append(Shard(document, index, rank, rank, rows))
            row, index = row + rows, index + 1
    return shards


def bytes_between(plan: SequencePlan, row_bytes: RowBytes) -> torch.Tensor:
    """Returns int64 [W, W], the bytes that each rank (first index) sends to each other in a forward pass, 0 to itself.
    A backward pass sends the gradient of the output as Q, and those of Q, K and V back."""
    moved = plan.q_rows * row_bytes.q + plan.kv_rows * row_bytes.kv + plan.q_rows.T * row_bytes.out
    return moved.fill_diagonal_(0)


def balance(
    shards: Iterable[Shard],
    world: int,
    *,
    block: int = BLOCK,
    row_bytes: RowBytes = ONE_EACH,
    max_bytes: int | None = None,
) -> list[Shard]:
    """Cuts the documents into shards whose attention ranks share the work. Home ranks are kept.

    shards: see `SequencePlan.build`; their attention ranks are ignored. Empty ones are dropped.
    world: W.
    block: rows of a document whose multiples are the possible cuts.
    row_bytes: bytes per row, for max_bytes.
    max_bytes: bytes that a rank may send, and may receive, in a forward pass (`bytes_between`). A rank exceeds them
        only if it does with all attention computed at home. None: no bound.

    Raises ValueError for a wrong argument, and names the shard that is wrong.
    """
    require_int("block", block, 1, MAX_ROWS)
    if not isinstance(row_bytes, RowBytes):
        raise ValueError(f"row_bytes is {row_bytes!r}, must be a RowBytes")
    for name, size in row_bytes._asdict().items():
        require_int(f"row_bytes.{name}", size, 1, 1 << 30)
    if max_bytes is not None:
        require_int("max_bytes", max_bytes, 0, MAX_BYTES)
    shards = listed("shards", shards)
    at_home = SequencePlan.build(computed_at_home(shards), world)
    stretches = _stretches(shards)
    load = at_home.attention_pairs.tolist()
    mean = -(-sum(load) // world)
    traffic = _Traffic(at_home, stretches, row_bytes, MAX_BYTES if max_bytes is None else max_bytes)
    takers = [(load[rank], rank) for rank in range(world) if load[rank] < mean]
    heapq.heapify(takers)
    to_give: dict[int, list[_Stretch]] = {rank: [] for rank in range(world) if load[rank] > mean}
    for stretch in stretches:
        if stretch.home in to_give:
            to_give[stretch.home].append(stretch)
    for giver in sorted(to_give, key=lambda rank: -load[rank]):
        full = []  # takers that can receive nothing more from this rank
        for stretch in sorted(to_give[giver], key=lambda stretch: -stretch.pairs(stretch.start)):
            while takers and load[giver] > mean and stretch.start < stretch.end:
                taker = takers[0][1]
                by_giver, by_taker = traffic.max_rows(stretch, taker)
                max_pairs = min(load[giver] - mean, mean - load[taker])
                cut = max(stretch.cut(by_giver, block), stretch.cut_by_pairs(max_pairs, block))
                if cut == stretch.end:
                    break  # no other rank has more room than the first taker
                cut = max(cut, stretch.cut(by_taker, block))
                if cut == stretch.end:
                    if not traffic.may_fit(stretch, block):
                        break
                    full.append(heapq.heappop(takers))
                    continue
                pairs = stretch.pairs(cut)
                load[giver] -= pairs
                load[taker] += pairs
                traffic.add(stretch, taker, cut)
                stretch.give(cut, taker)
                if load[taker] < mean:
                    heapq.heapreplace(takers, (load[taker], taker))
                else:
                    heapq.heappop(takers)
        for entry in full:
            heapq.heappush(takers, entry)
    return _shards(stretches)


def computed_at_home(shards: Iterable[Shard]) -> list[Shard]:
    """Returns the shards with their home ranks as attention ranks. `SequencePlan.build` refuses what is not a Shard."""
    return [
        Shard(shard.document, shard.index, shard.home_rank, shard.home_rank, shard.length)
        if isinstance(shard, Shard)
        else shard
        for shard in shards
    ]


@dataclass
class _Stretch:
    """Consecutive rows of a document with one home rank. end: end of the rows that the home rank computes. given: (end,
    rank) of the pieces that were given away, the last one first."""

    document: int
    start: int
    whole_end: int
    home: int
    end: int
    given: Sequence[tuple[int, int]] = ()

    def pairs(self, cut: int) -> int:
        """Returns the (query, key) pairs of the rows from `cut` on."""
        return causal_pairs(cut, self.end)

    def cut(self, max_rows: int, block: int) -> int:
        """Returns the first cut with at most max_rows rows after it."""
        return self._at_block(self.end - max(0, max_rows), block)

    def cut_by_pairs(self, most: int, block: int) -> int:
        """Returns the first cut after which the rows have at most `most` pairs."""
        before = self.end * (self.end + 1) - 2 * most  # twice the pairs of the rows before
        if before <= 0:
            return self.start
        cut = (math.isqrt(4 * before + 1) - 1) // 2
        return self._at_block(cut + (cut * (cut + 1) < before), block)

    def _at_block(self, row: int, block: int) -> int:
        return self.start if row <= self.start else min(self.end, -(-row // block) * block)

    def give(self, cut: int, rank: int) -> None:
        if not self.given or self.given[-1][1] != rank:
            self.given = [*self.given, (self.end, rank)]
        self.end = cut


class _Traffic:
    """The bytes that every rank sends and receives. Rows that a giving rank no longer needs are still counted."""

    def __init__(self, at_home: SequencePlan, stretches: list[_Stretch], row_bytes: RowBytes, max_bytes: int) -> None:
        moved = bytes_between(at_home, row_bytes)
        self._sent, self._received = moved.sum(1).tolist(), moved.sum(0).tolist()
        self._row_bytes, self._max_bytes = row_bytes, max_bytes
        self._of_document = defaultdict[int, list[_Stretch]](list)
        self._context: dict[tuple[int, int], int] = {}  # (document, rank): leading rows that the rank receives
        for stretch in stretches:
            self._of_document[stretch.document].append(stretch)

    def max_rows(self, stretch: _Stretch, taker: int) -> tuple[int, int]:
        """Returns how many rows of a stretch's end may be given within the bounds of the ranks that send them, and
        within those of the taker."""
        size, giver = self._row_bytes, stretch.home
        context = self._new_context(stretch, taker)
        to_send = self._max_bytes - self._sent[giver] - context.get(giver, 0)
        by_giver = min(to_send // size.q, (self._max_bytes - self._received[giver]) // size.out)
        if any(self._sent[home] + extra > self._max_bytes for home, extra in context.items()):
            by_giver = 0
        to_receive = self._max_bytes - self._received[taker] - sum(context.values())
        return by_giver, min(to_receive // size.q, (self._max_bytes - self._sent[taker]) // size.out)

    def may_fit(self, stretch: _Stretch, block: int) -> bool:
        """Returns whether a rank with no other traffic could compute the last block."""
        size = self._row_bytes
        return stretch.end * size.kv + block * size.q <= self._max_bytes and block * size.out <= self._max_bytes

    def add(self, stretch: _Stretch, taker: int, cut: int) -> None:
        size, rows = self._row_bytes, stretch.end - cut
        for home, extra in self._new_context(stretch, taker).items():
            self._sent[home] += extra
            self._received[taker] += extra
        self._sent[stretch.home] += rows * size.q
        self._received[taker] += rows * size.q
        self._sent[taker] += rows * size.out
        self._received[stretch.home] += rows * size.out
        key = stretch.document, taker
        self._context[key] = max(self._context.get(key, 0), stretch.end)

    def _new_context(self, stretch: _Stretch, taker: int) -> dict[int, int]:
        """Returns the bytes of K and V that the stretch's last row needs and the taker lacks, by home rank."""
        needed: dict[int, int] = {}
        there = self._context.get((stretch.document, taker), 0)
        for source in self._of_document[stretch.document]:
            if source.home == taker:
                there = max(there, source.whole_end)  # the taker needs these for its own rows
        for source in self._of_document[stretch.document]:
            rows = min(source.whole_end, stretch.end) - max(source.start, there)
            if rows > 0:
                needed[source.home] = needed.get(source.home, 0) + rows * self._row_bytes.kv
        return needed


def _stretches(shards: Sequence[Shard]) -> list[_Stretch]:
    """Returns the stretches of shards that are not empty, by (document, index)."""
    stretches, row = [], defaultdict[int, int](int)
    for shard in sorted(sorted(shards, key=attrgetter("index")), key=attrgetter("document")):
        if shard.length:
            start = row[shard.document]
            end = row[shard.document] = start + shard.length
            stretches.append(_Stretch(shard.document, start, end, shard.home_rank, end))
    return stretches


def _shards(stretches: list[_Stretch]) -> list[Shard]:
    shards, count = [], defaultdict[int, int](int)
    for stretch in stretches:
        start = stretch.start
        for end, rank in [(stretch.end, stretch.home), *reversed(stretch.given)]:
            if start < end:
                shards.append(Shard(stretch.document, count[stretch.document], stretch.home, rank, end - start))
                count[stretch.document] += 1
            start = end
    return shards
