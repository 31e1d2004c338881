"""The balance of rows over ranks: over time, over layers, within and between nodes, lasting or momentary.

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
    """Statistics of a layer's passes: max/mean over ranks as mean, p50, p95 and most.

    lasting: max/mean of loads averaged over a window of steps, which moving experts once per window could remove.
    momentary: mean minus lasting. between_nodes: max/mean over nodes, which copies of experts within nodes keep.
    second_half, placed: max/mean of the second half of the run: as run, and with the best placement for the first
        half; NaN with a single step.
    """

    layer: int
    mean: float
    p50: float
    p95: float
    most: float
    lasting: float
    momentary: float
    between_nodes: float
    second_half: float
    placed: float


@dataclass(frozen=True)
class Period:
    """The max/mean of steps from first to last: mean, p50 and p95 over passes of all layers."""

    first: int
    last: int
    mean: float
    p50: float
    p95: float


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


def of_passes(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps of all passes of all groups, and their max/mean over ranks."""
    spread = [max_over_mean(rank_loads(expert_rows(group), trace.expert_ranks)) for group in trace.groups]
    return np.concatenate([group.steps for group in trace.groups]), np.concatenate(spread)


def _layer_numbers(trace: Trace) -> list[int]:
    return sorted({int(layer) for group in trace.groups for layer in np.unique(group.layers)})


def layers(trace: Trace, ranks_per_node: int, window: int) -> list[LayerSpread]:
    """Returns the spread of each layer, over all groups."""
    found = []
    for layer in _layer_numbers(trace):
        parts = [_OfLayer(group, layer, trace.expert_ranks) for group in trace.groups if (group.layers == layer).any()]
        spread = np.concatenate([max_over_mean(part.loads) for part in parts])
        lasting = float(np.mean([part.lasting(window) for part in parts]))
        halves = np.mean([part.halves() for part in parts], axis=0)
        nodes = [max_over_mean(rank_loads(part.loads, trace.expert_ranks // ranks_per_node)) for part in parts]
        p50, p95 = np.quantile(spread, (0.5, 0.95))
        found.append(
            LayerSpread(
                layer=layer,
                mean=float(spread.mean()),
                p50=float(p50),
                p95=float(p95),
                most=float(spread.max()),
                lasting=lasting,
                momentary=float(spread.mean()) - lasting,
                between_nodes=float(np.concatenate(nodes).mean()),
                second_half=float(halves[0]),
                placed=float(halves[1]),
            )
        )
    return found


def periods(trace: Trace) -> list[Period]:
    """Returns PERIODS parts with equally many steps, or a part per step, and then the whole run."""
    steps, spread = of_passes(trace)
    numbers = np.unique(steps)
    found = []
    for part in (*np.array_split(numbers, min(PERIODS, len(numbers))), numbers):
        of_part = spread[(steps >= part[0]) & (steps <= part[-1])]
        p50, p95 = np.quantile(of_part, (0.5, 0.95))
        found.append(Period(int(part[0]), int(part[-1]), float(of_part.mean()), float(p50), float(p95)))
    return found


class _OfLayer:
    """The passes of a layer in a group."""

    def __init__(self, group: Group, layer: int, ranks: int) -> None:
        taken = group.layers == layer
        self.steps = group.steps[taken]
        self.rows = expert_rows(group, taken)
        self.ranks = ranks
        self.loads = rank_loads(self.rows, ranks)

    def lasting(self, window: int) -> float:
        """Returns max/mean of the mean loads of windows of steps, averaged over passes."""
        number = (self.steps - self.steps.min()) // window
        parts = [self.loads[number == which] for which in np.unique(number)]
        each = [float(max_over_mean(part.mean(axis=0))) * len(part) for part in parts]
        return sum(each) / len(self.loads)

    def halves(self) -> tuple[float, float]:
        """Returns max/mean in the second half of the steps, unchanged and with the placement of the first half."""
        steps = np.unique(self.steps)
        if len(steps) < 2:
            return float("nan"), float("nan")
        is_second = self.steps >= steps[len(steps) // 2]
        order = placement(self.rows[~is_second].mean(axis=0), self.ranks)
        second = self.rows[is_second]
        placed = rank_loads(second[:, order], self.ranks)
        return float(max_over_mean(rank_loads(second, self.ranks)).mean()), float(max_over_mean(placed).mean())


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
