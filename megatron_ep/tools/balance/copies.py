"""Copies of hot experts on other ranks of their node, for one micro-batch in one layer: which, and how many rows each.

E experts, L of them on each rank, S places for copies on a rank, m the fewest rows that a copy is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Copies:
    """loads: rows of each rank afterwards. made: copies. busiest: the most that one rank sends or receives."""

    loads: tuple[int, ...]
    made: int
    busiest: int


def plan(rows: Sequence[int], ranks: int, ranks_per_node: int, slots: int, min_rows: int) -> Copies:
    """Moves rows from ranks over the mean of their node to those with the fewest, the hottest experts first.

    One pass without a way back, integers alone: the same on every rank that does it.

    Args:
        rows: of each of the E experts; rank r has experts r L to (r + 1) L - 1.
        ranks: W; nodes are ranks_per_node of them side by side.
        slots: S.
        min_rows: m, at least 1.
    """
    local = len(rows) // ranks
    loads = [sum(rows[rank * local : (rank + 1) * local]) for rank in range(ranks)]
    sent, received = [0] * ranks, [0] * ranks
    for first in range(0, ranks, ranks_per_node):
        node = range(first, first + ranks_per_node)
        target = -(-sum(loads[rank] for rank in node) // ranks_per_node)
        for rank in sorted(node, key=lambda rank: (-loads[rank], rank)):
            if loads[rank] - target < min_rows:
                break
            for expert in sorted(range(rank * local, (rank + 1) * local), key=lambda e: (-rows[e], e)):
                left, holders = rows[expert], {rank}
                while loads[rank] - target >= min_rows and left >= min_rows:
                    free = [other for other in node if other not in holders and received[other] < slots]
                    if not free:
                        break
                    to = min(free, key=lambda other: (loads[other], other))
                    moved = min(loads[rank] - target, left, target - loads[to])
                    if moved < min_rows:
                        break
                    holders.add(to)
                    left -= moved
                    loads[rank] -= moved
                    loads[to] += moved
                    sent[rank] += 1
                    received[to] += 1
    return Copies(tuple(loads), sum(sent), max(map(max, zip(sent, received, strict=True))))
