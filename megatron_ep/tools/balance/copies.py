"""Predicts what copies of experts on other ranks would gain: a rank with room gets the weights of an expert with many
rows, and a part of these rows, chosen anew in each pass.

E experts, W ranks. This project has no such copies; the prediction is arithmetic on recorded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_ep.tools.balance import spread
from megatron_ep.tools.balance.trace import Trace

# Per weight: bf16 for the forward pass and again for the backward pass, and the gradient's way back in fp32.
BYTES_PER_WEIGHT = 2 + 2 + 4
FLOP_PER_WEIGHT = 6  # and row: a product of the forward pass and two of the backward pass, 2 FLOP each
# A copy must take at least as many rows as its transfer is worth, times one of these; the best is taken in each pass.
LEAST_ROWS = (0.25, 0.5, 1.0, 2.0)


class Copy(NamedTuple):
    """A part of an expert's rows, that another rank takes."""

    expert: int
    rank: int
    rows: int


@dataclass(frozen=True)
class Layer:
    """The layer whose times are predicted. The trace's rows are scaled to its tokens.

    weights: of an expert. rows: of a rank, on average. share: part of an evenly loaded step that grows as the rows of
        the busiest rank do. tflops: of the experts' products. gb_s: of the way that weights and gradients take.
    """

    weights: int
    rows: int
    share: float
    tflops: float
    gb_s: float

    @property
    def experts_ms(self) -> float:
        """Returns the time of the experts of an evenly loaded rank, forward and backward."""
        return FLOP_PER_WEIGHT * self.weights * self.rows / self.tflops / 1e9

    @property
    def copy_ms(self) -> float:
        """Returns the time of a copy's transfers."""
        return BYTES_PER_WEIGHT * self.weights / self.gb_s / 1e6


@dataclass(frozen=True)
class Gain:
    """What `slots` copies on each rank gain in steps from first to last.

    before, after: mean of max/mean over passes. copies: of a pass, on average over those of all ranks.
    least, most: part of a step: if nothing runs beside the transfers, and if they are hidden completely.
    """

    slots: int
    first: int
    last: int
    before: float
    after: float
    copies: float
    least: float
    most: float


def plan(rows: Sequence[int], ranks: int, slots: int, node: int | None = None, least: int = 1) -> list[Copy]:
    """Returns copies that bring ranks with more rows than their node's mean, rounded up, down to it: the rank with the
    most rows gives rows of its expert with the most to the rank with the fewest that has a free slot.

    rows: [E], of each expert. slots: copies on a rank at most. node: ranks, consecutive ones, that share copies; None:
    all. least: rows of a copy, at least.
    """
    node, local = node or ranks, len(rows) // ranks
    left, free, copies = [int(of_expert) for of_expert in rows], [slots] * ranks, []
    loads = [sum(left[rank * local : (rank + 1) * local]) for rank in range(ranks)]
    for first in range(0, ranks, node):
        members = range(first, first + node)
        target = -(-sum(loads[rank] for rank in members) // node)
        givers = {rank for rank in members if loads[rank] > target}
        while givers:
            takers = [rank for rank in members if free[rank] and loads[rank] < target]
            if not takers:
                break
            giver, taker = max(givers, key=lambda rank: (loads[rank], -rank)), min(takers, key=loads.__getitem__)
            expert = max(range(giver * local, (giver + 1) * local), key=lambda expert: (left[expert], -expert))
            moved = min(loads[giver] - target, target - loads[taker], left[expert])
            if moved < max(1, least):
                givers.remove(giver)  # no other expert or rank allows more
                continue
            copies.append(Copy(expert, taker, moved))
            loads[giver], loads[taker], left[expert] = loads[giver] - moved, loads[taker] + moved, left[expert] - moved
            free[taker] -= 1
            if loads[giver] == target:
                givers.remove(giver)
    return copies


def loads_with(copies: Sequence[Copy], rows: np.ndarray, ranks: int) -> np.ndarray:
    """Returns the rows of each rank [W]."""
    loads, local = spread.rank_loads(rows, ranks), len(rows) // ranks
    for copy in copies:
        loads[copy.expert // local] -= copy.rows
        loads[copy.rank] += copy.rows
    return loads


def busiest_link(copies: Sequence[Copy], local_experts: int, ranks: int) -> int:
    """Returns the copies that the rank with the most sends or receives, the larger of the two."""
    sent = np.bincount([copy.expert // local_experts for copy in copies], minlength=ranks)
    received = np.bincount([copy.rank for copy in copies], minlength=ranks)
    return int(max(sent.max(), received.max()))


def gains(trace: Trace, layer: Layer, slots: int, node: int | None = None) -> list[Gain]:
    """Returns the gain in the parts of a run, and in the whole run."""
    rows = np.concatenate([spread.expert_rows(group) for group in trace.groups])
    steps = np.concatenate([group.steps for group in trace.groups])
    passes = [_Pass(of_pass, trace.expert_ranks, layer, slots, node) for of_pass in rows]
    before, after, copies, exposed = (
        np.array([getattr(of_pass, name) for of_pass in passes]) for name in ("before", "after", "copies", "exposed_ms")
    )
    even_ms = layer.experts_ms / layer.share  # of a step, by layer and micro-batch
    step_ms, hidden_ms = even_ms + layer.experts_ms * (before - 1), layer.experts_ms * (before - after)
    found = []
    for first, last in spread.parts(steps):
        of_part = (steps >= first) & (steps <= last)
        means = (values[of_part].mean() for values in (before, after, copies))
        whole = step_ms[of_part].sum()
        parts = (values[of_part].sum() / whole for values in (exposed, hidden_ms))
        found.append(Gain(slots, first, last, *map(float, means), *map(float, parts)))
    return found


class _Pass:
    """A pass: max/mean before and after, copies, and ms gained by the plan that is best if nothing is hidden."""

    def __init__(self, rows: np.ndarray, ranks: int, layer: Layer, slots: int, node: int | None) -> None:
        local, mean = len(rows) // ranks, rows.sum() / ranks
        self.before = float(spread.max_over_mean(spread.rank_loads(rows, ranks)))
        break_even = layer.copy_ms / layer.experts_ms * mean  # rows of the trace
        self.exposed_ms = 0.0
        for factor in (0.0, *LEAST_ROWS):
            copies = plan(rows.tolist(), ranks, slots, node, int(factor * break_even))
            after = float(spread.max_over_mean(loads_with(copies, rows, ranks)))
            if factor == 0.0:
                self.after, self.copies = after, len(copies)
            transfer_ms = layer.copy_ms * busiest_link(copies, local, ranks)
            self.exposed_ms = max(self.exposed_ms, layer.experts_ms * (self.before - after) - transfer_ms)
