"""How evenly rows fall on ranks: over time, over layers, inside nodes and between them, lasting or not.

The measure is max/mean: the most that a rank has over what each would have if all had equally many, 1 at best. A rank
with less waits for the one with the most. n passes, E experts, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ep.tools.balance.trace import Group, Trace

PERIODS = 10  # that the run is divided into


@dataclass(frozen=True)
class LayerSpread:
    """Statistics of a layer's passes: max/mean over ranks as mean, p50, p95 and most.

    lasting: max/mean of loads averaged over a window of steps: what re-placing experts that often could remove.
    momentary: what the mean has beyond that. between_nodes: max/mean over nodes: what copies inside nodes leave.
    second_half, placed: max/mean of the second half of the run: as run, and with the placement that is best for the
        first half; NaN with a single step.
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
    """Steps from first to last: max/mean, mean, p50 and p95 over passes of all layers."""

    first: int
    last: int
    mean: float
    p50: float
    p95: float


def expert_rows(group: Group, taken: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Rows of each expert, from all ranks, of the passes that are taken: int64 [n, E]."""
    return group.counts[taken].sum(axis=1, dtype=np.int64)


def rank_loads(rows: np.ndarray, ranks: int) -> np.ndarray:
    """[..., E] -> [..., W]."""
    return rows.reshape(*rows.shape[:-1], ranks, -1).sum(axis=-1)


def max_over_mean(loads: np.ndarray) -> np.ndarray:
    """Over the last axis; 1 where there is nothing."""
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
    """The run in PERIODS parts of equally many steps, or a step each, and then the whole of it."""
    steps, spread = of_passes(trace)
    numbers = np.unique(steps)
    found = []
    for part in (*np.array_split(numbers, min(PERIODS, len(numbers))), numbers):
        of_part = spread[(steps >= part[0]) & (steps <= part[-1])]
        p50, p95 = np.quantile(of_part, (0.5, 0.95))
        found.append(Period(int(part[0]), int(part[-1]), float(of_part.mean()), float(p50), float(p95)))
    return found


class _OfLayer:
    """A layer's passes in a group."""

    def __init__(self, group: Group, layer: int, ranks: int) -> None:
        taken = group.layers == layer
        self.steps = group.steps[taken]
        self.rows = expert_rows(group, taken)
        self.ranks = ranks
        self.loads = rank_loads(self.rows, ranks)

    def lasting(self, window: int) -> float:
        """max/mean of the mean loads of windows of steps, averaged over passes."""
        number = (self.steps - self.steps.min()) // window
        parts = [self.loads[number == which] for which in np.unique(number)]
        each = [float(max_over_mean(part.mean(axis=0))) * len(part) for part in parts]
        return sum(each) / len(self.loads)

    def halves(self) -> tuple[float, float]:
        """max/mean in the second half of the steps: as it is, and with the places that the first half suggests."""
        steps = np.unique(self.steps)
        if len(steps) < 2:
            return float("nan"), float("nan")
        is_second = self.steps >= steps[len(steps) // 2]
        order = placement(self.rows[~is_second].mean(axis=0), self.ranks)
        second = self.rows[is_second]
        placed = rank_loads(second[:, order], self.ranks)
        return float(max_over_mean(rank_loads(second, self.ranks)).mean()), float(max_over_mean(placed).mean())


def placement(rows: np.ndarray, ranks: int) -> np.ndarray:
    """Experts in an order in which each rank, with equally many of them side by side, has about as many rows: the
    hottest first, each to the rank with the fewest rows that has a place (LPT)."""
    local = len(rows) // ranks
    loads, places = [0.0] * ranks, [[] for _ in range(ranks)]  # type: list[float], list[list[int]]
    for expert in sorted(range(len(rows)), key=lambda expert: (-rows[expert], expert)):
        rank = min((rank for rank in range(ranks) if len(places[rank]) < local), key=lambda rank: (loads[rank], rank))
        places[rank].append(expert)
        loads[rank] += float(rows[expert])
    return np.array([expert for experts in places for expert in sorted(experts)])


def places(trace: Trace) -> dict[int, list[int]]:
    """For each layer the experts in the order that `placement` gives by the whole trace: rank after rank."""
    found = {}
    for layer in _layer_numbers(trace):
        rows = np.sum([expert_rows(group, group.layers == layer).sum(axis=0) for group in trace.groups], axis=0)
        found[layer] = placement(rows, trace.expert_ranks).tolist()
    return found
