"""The balance of rows over ranks, by layer and over time.

The measure is max/mean: the largest load of a rank over the mean load, at best 1. All other ranks wait for the rank
with the largest load. n passes, E experts, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ep.tools.balance.trace import Group, Trace

PERIODS = 10  # number of parts of a run


@dataclass(frozen=True)
class LayerSpread:
    """Statistics of a layer's passes: max/mean over ranks as p50, p95, most and mean.

    second_half, placed: max/mean of the second half of the run: as run, and with the best placement for the first
        half; NaN with a single step.
    """

    layer: int
    p50: float
    p95: float
    most: float
    mean: float
    second_half: float
    placed: float


@dataclass(frozen=True)
class Period:
    """The max/mean of steps from first to last: p50, p95 and mean over passes of all layers."""

    first: int
    last: int
    p50: float
    p95: float
    mean: float


def expert_rows(group: Group, taken: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Returns the rows of each expert, from all ranks, in the selected passes: int64 [n, E]."""
    return group.counts[taken].sum(axis=1, dtype=np.int64)


def rank_loads(rows: np.ndarray, ranks: int) -> np.ndarray:
    """Sums rows of experts [..., E] to loads of ranks [..., W]."""
    return rows.reshape(*rows.shape[:-1], ranks, -1).sum(axis=-1)


def max_over_mean(loads: np.ndarray) -> np.ndarray:
    """Returns max/mean over the last axis; 1 if there are no rows."""
    mean = loads.mean(axis=-1)
    return np.divide(loads.max(axis=-1), mean, out=np.ones_like(mean, dtype=float), where=mean > 0)


def _layer_numbers(trace: Trace) -> list[int]:
    return sorted({int(layer) for group in trace.groups for layer in np.unique(group.layers)})


def layers(trace: Trace) -> list[LayerSpread]:
    """Returns the spread of each layer, over all groups."""
    found, ranks = [], trace.expert_ranks
    for layer in _layer_numbers(trace):
        spread, halves = [], []
        for group in trace.groups:
            taken = group.layers == layer
            if taken.any():
                rows = expert_rows(group, taken)
                spread.append(max_over_mean(rank_loads(rows, ranks)))
                halves.append(_halves(group.steps[taken], rows, ranks))
        values = np.concatenate(spread)
        numbers = (*np.quantile(values, (0.5, 0.95)), values.max(), values.mean(), *np.mean(halves, axis=0))
        found.append(LayerSpread(layer, *map(float, numbers)))
    return found


def periods(trace: Trace) -> list[Period]:
    """Returns the spread in the `parts` of a run."""
    loads = [rank_loads(expert_rows(group), trace.expert_ranks) for group in trace.groups]
    spread = np.concatenate([max_over_mean(load) for load in loads])
    steps = np.concatenate([group.steps for group in trace.groups])
    found = []
    for first, last in parts(steps):
        of_part = spread[(steps >= first) & (steps <= last)]
        p50, p95 = np.quantile(of_part, (0.5, 0.95))
        found.append(Period(first, last, float(p50), float(p95), float(of_part.mean())))
    return found


def parts(steps: np.ndarray) -> list[tuple[int, int]]:
    """Returns the first and last step of PERIODS parts with equally many steps, or of a part per step, and then those
    of the whole run."""
    numbers = np.unique(steps)
    split = (*np.array_split(numbers, min(PERIODS, len(numbers))), numbers)
    return [(int(part[0]), int(part[-1])) for part in split]


def _halves(steps: np.ndarray, rows: np.ndarray, ranks: int) -> tuple[float, float]:
    """Returns max/mean in the second half of the steps, unchanged and with the placement of the first half.

    steps: [n]. rows: [n, E], of each expert.
    """
    different = np.unique(steps)
    if len(different) < 2:
        return float("nan"), float("nan")
    is_second = steps >= different[len(different) // 2]
    order, second = placement(rows[~is_second].mean(axis=0), ranks), rows[is_second]
    as_run, placed = (max_over_mean(rank_loads(part, ranks)).mean() for part in (second, second[:, order]))
    return float(as_run), float(placed)


def placement(rows: np.ndarray, ranks: int) -> np.ndarray:
    """Returns experts in an order that balances ranks, each of which has equally many consecutive experts: assigns the
    expert with the most rows first, to the rank with the fewest rows that has a free place (LPT)."""
    local = len(rows) // ranks
    loads, places = [0.0] * ranks, [[] for _ in range(ranks)]  # type: list[float], list[list[int]]
    for expert in sorted(range(len(rows)), key=lambda expert: (-rows[expert], expert)):
        rank = min((rank for rank in range(ranks) if len(places[rank]) < local), key=lambda rank: (loads[rank], rank))
        places[rank].append(expert)
        loads[rank] += float(rows[expert])
    return np.array([expert for experts in places for expert in sorted(experts)])


def places(trace: Trace) -> dict[int, list[int]]:
    """Returns for each layer the experts in the order of `placement` for the whole trace."""
    found = {}
    for layer in _layer_numbers(trace):
        rows = np.sum([expert_rows(group, group.layers == layer).sum(axis=0) for group in trace.groups], axis=0)
        found[layer] = placement(rows, trace.expert_ranks).tolist()
    return found
