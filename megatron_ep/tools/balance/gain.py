"""What copies of hot experts would save, and what they cost.

An expert of P parameters takes 2P operations a row forward and 4P backward; to copy it takes 2P bytes (bf16), its
gradient 4P (fp32). So how many rows a copy has to take over depends on the machine, not on the expert's size. The model
counts rows and copies inside a node; it knows nothing of the smaller products' efficiency, nor of what overlaps with
the waiting today.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ep.tools.balance.copies import plan
from megatron_ep.tools.balance.spread import expert_rows, max_over_mean, rank_loads
from megatron_ep.tools.balance.trace import Group, Trace

WORTH = 0.03  # of a step, from which on copies are worth it: less is lost in what the model leaves out
MAX_PLANS = 4000  # of a setting; of more passes, steps at even distances are taken
FORWARD_AND_BACKWARD = 6  # operations a parameter and row
SLOT_BYTES = 6  # a parameter: bf16 weights and an fp32 gradient
# A product with fewer rows does not fill a GPU, whatever the copy costs.
PRODUCT_ROWS = 1024


@dataclass(frozen=True)
class Machine:
    """tflops: 10^12 operations a second of the experts' products, gb_s: 10^9 bytes a second between two GPUs of a
    node."""

    tflops: float = 600.0
    gb_s: float = 380.0

    @property
    def operations_per_byte(self) -> float:
        return self.tflops * 1e3 / self.gb_s


@dataclass(frozen=True)
class Exposure:
    """What of a copy nothing else hides: bytes a parameter of the expert. us: of the plan, in every pass of a layer,
    as a target: nothing of this is built."""

    name: str
    bytes: float
    us: float

    def min_rows(self, machine: Machine) -> int:
        """From how many rows on a copy saves more than it takes."""
        return max(PRODUCT_ROWS, math.ceil(self.bytes / FORWARD_AND_BACKWARD * machine.operations_per_byte))


# Both copy weights forward while a rank's own experts work.
PLAIN = Exposure("plain", 6.0, 100.0)  # waits for the copy backward, and for the gradients
OVERLAPPED = Exposure("overlapped", 1.0, 60.0)  # for half of the copy backward: gradients beside the attention's


@dataclass(frozen=True)
class Gain:
    """With S slots a rank, of the group that loses most: means over its passes.

    spread: max/mean over ranks before and after. copies: of a pass. busiest: of a pass, copies that the busiest rank
    sends or receives. lost: what a step loses to imbalance before, and to it and to the copies after; in ms, or without
    expert_parameters in products of one row. saved: the difference, as a share of what `of` names. slot_bytes: of S
    slots on a rank; None likewise.
    """

    slots: int
    exposure: Exposure
    min_rows: int
    spread: tuple[float, float]
    copies: float
    busiest: float
    lost: tuple[float, float]
    saved: float
    of: str
    slot_bytes: int | None


@dataclass(frozen=True)
class Costs:
    """What a step is compared with. step_ms None: with the time of the experts' products, which is less than a step, so
    that the share is an upper bound. min_rows None: `Exposure.min_rows`."""

    machine: Machine = Machine()
    expert_parameters: int | None = None
    step_ms: float | None = None
    min_rows: int | None = None


def gain(trace: Trace, ranks_per_node: int, slots: int, exposure: Exposure, costs: Costs) -> Gain:
    """What S = slots would save with these costs."""
    of_groups = [_of_group(trace, group, ranks_per_node, slots, exposure, costs) for group in trace.groups]
    return max(of_groups, key=lambda one: one.lost[0])


def _of_group(trace: Trace, group: Group, ranks_per_node: int, slots: int, exposure: Exposure, costs: Costs) -> Gain:
    machine, parameters = costs.machine, costs.expert_parameters
    min_rows = costs.min_rows or exposure.min_rows(machine)
    steps = np.unique(group.steps)
    taken = np.isin(group.steps, steps[:: -(-len(group.steps) // MAX_PLANS)])
    rows = expert_rows(group, taken) * trace.scaled
    number_of_steps = len(np.unique(group.steps[taken]))
    before = rank_loads(rows, trace.expert_ranks)
    after, made, busiest = before.copy(), np.zeros(len(rows)), np.zeros(len(rows))
    for number, of_experts in enumerate(rows.tolist()):
        copies = plan(of_experts, trace.expert_ranks, ranks_per_node, slots, min_rows)
        after[number], made[number], busiest[number] = copies.loads, copies.made, copies.busiest
    # A row's products are the unit of time.
    ms = None if parameters is None else FORWARD_AND_BACKWARD * parameters / (machine.tflops * 1e9)
    mean = before.mean(axis=1)
    waits = (before.max(axis=1) - mean).sum() / number_of_steps
    waits_after = (after.max(axis=1) - mean).sum() / number_of_steps
    copying = busiest.sum() * exposure.bytes / FORWARD_AND_BACKWARD * machine.operations_per_byte / number_of_steps
    planning = 0.0 if ms is None or not slots else exposure.us / 1e3 * len(rows) / number_of_steps / ms
    lost = (waits, waits_after + copying + planning)
    products = before.max(axis=1).sum() / number_of_steps
    whole = products if ms is None or costs.step_ms is None else costs.step_ms / ms
    return Gain(
        slots=slots,
        exposure=exposure,
        min_rows=min_rows,
        spread=(float(max_over_mean(before).mean()), float(max_over_mean(after).mean())),
        copies=float(made.mean()),
        busiest=float(busiest.mean()),
        lost=(float(lost[0] * (ms or 1)), float(lost[1] * (ms or 1))),
        saved=float((lost[0] - lost[1]) / whole) if whole else 0.0,
        of="the experts' products" if ms is None or costs.step_ms is None else "a step",
        slot_bytes=None if parameters is None else SLOT_BYTES * parameters * slots,
    )


def verdict(gains: list[Gain]) -> str:
    """One sentence."""
    plain, overlapped = (
        max((one for one in gains if one.exposure is exposure), key=lambda one: one.saved)
        for exposure in (PLAIN, OVERLAPPED)
    )
    knows_step = plain.of == "a step"
    may, most, hint = ("", "", "") if knows_step else ("may be ", "at most ", "; --step-ms says how much")
    if plain.saved >= WORTH:
        return f"{may}worth it: copies would save {most}{plain.saved:.1%} of a step with S = {plain.slots}{hint}"
    if overlapped.saved >= WORTH:
        return (
            f"{may}worth it if copies and gradients overlap with other work, and only then: they would save {most}"
            f"{overlapped.saved:.1%} of a step with S = {overlapped.slots}{hint}"
        )
    best = max(plain, overlapped, key=lambda one: one.saved)
    if best.saved <= 0:
        return "not worth it: copies would save nothing"
    return f"not worth it: copies would save {most}{best.saved:.1%} of a step, less than {WORTH:.0%}"
