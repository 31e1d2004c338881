"""Predicts the times of a case on a machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_ep import _simulate
from megatron_ep.tools.simulate.case import Case
from megatron_ep.tools.simulate.machine import Machine

# Names of a rank's servers for users.
SERVERS = {
    "sm": "stores and loads of the SMs",
    "memory": "memory of the GPU",
    "link_out": "NVLink, outgoing",
    "link_in": "NVLink, incoming",
    "card": "network card",
}
# Share of the time from which a busy server is the bottleneck of a phase.
BOTTLENECK = 0.75

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class Role:
    """The work of the warps of a role on all simulated ranks. Times are in us, summed over these warps.

    copied: time in copies and sums of rows.
    waited: time in waits, by what they waited for.
    """

    warps: int
    time: float
    copied: float
    waited: dict[str, float]


@dataclass(frozen=True)
class Phase:
    """Notify, dispatch or combine.

    is_calibrated: whether the machine's constants were fitted to measurements of this phase.
    rail_rows: rows of the simulated ranks that cross the network.
    peer_rows: rows that they send to another rank: all in the normal mode, those over NVLink in the low-latency mode.
    ends: us after which each simulated rank is done.
    busy: busy share of the time, by server, of the rank with the largest.
    bytes_sent, row_bytes, messages: totals of all simulated network cards; row_bytes are those of rows, or counts,
        without flags.
    """

    is_calibrated: bool
    rail_rows: int
    peer_rows: int
    ends: list[float]
    roles: dict[str, Role]
    busy: dict[str, float]
    bytes_sent: float
    row_bytes: float
    messages: int

    def at(self, part: float) -> float:
        """Returns the time of the rank at this quantile: 0.5 the median, 1 the last."""
        ordered = sorted(self.ends)
        return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]

    @property
    def us(self) -> float:
        """Returns the time of the slowest rank."""
        return max(self.ends)

    @property
    def bottleneck(self) -> str:
        server, share = max(self.busy.items(), key=lambda item: item[1])
        if share >= BOTTLENECK:
            return f"{SERVERS[server]}, busy {share:.0%} of the time"
        return f"latency: {SERVERS[server]} {'are' if server == 'sm' else 'is'} busiest, {share:.0%} of the time"


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a case on a machine.

    phases: dispatch with a known layout ("dispatch"), and combine.
    notify: the exchange of counts before a dispatch without a known layout; None in the low-latency mode. It is not
        calibrated, because it has not been measured alone.
    """

    case: Case
    machine: Machine
    phases: dict[str, Phase]
    notify: Phase | None


def predict(case: Case, machine: Machine, *, on_progress: OnProgress | None = None, choices: Any = None) -> Prediction:
    """Simulates a dispatch, in the normal mode after its notify, and its combine.

    on_progress: called regularly with the phase and its progress, 0 to 1.
    choices: result of `Case.choices`; None: it is called.

    Raises ValueError for settings that no buffer could have; RuntimeError if a wait expires; KeyboardInterrupt for
    Ctrl-C.
    """
    if case.uses_network and not machine.has_card:
        nodes = case.topology.nodes
        raise ValueError(f"machine is {machine.name}, which has no network card, but the case has {nodes} nodes")
    ids: list[torch.Tensor] = case.choices() if choices is None else choices
    mode = (_simulate.LowLatency if case.is_low_latency else _simulate.Transfers)(
        machine.compiled(), topk_idx=[each.data_ptr() for each in ids], settings=case.compiled_settings()
    )
    phases: dict[str, Phase] = {}
    notify = None
    for name in ("dispatch", "combine") if case.is_low_latency else ("notify", "dispatch", "combine"):
        found = getattr(mode, name)(partial(on_progress, name) if on_progress else None)
        if name == "notify":
            notify = phase_of(found, 0, 0, is_calibrated=False)
            continue
        rows = (
            mode.arrivals(name == "combine")
            if isinstance(mode, _simulate.LowLatency)
            else (mode.rail_rows, mode.peer_rows)
        )
        phases[name] = phase_of(found, *rows, is_calibrated=True)
    return Prediction(case, machine, phases, notify)


def phase_of(found: dict[str, Any], rail_rows: int, peer_rows: int, *, is_calibrated: bool) -> Phase:
    """Returns a phase. found: result of the extension."""
    roles = {name: Role(**role) for name, role in found["roles"].items()}
    return Phase(is_calibrated, rail_rows, peer_rows, **{**found, "roles": roles})


def machines_in_band(machine: Machine) -> Iterator[Machine]:
    """Returns the machines with the network card's constants at their bounds."""
    if not machine.band:
        return
    for values in itertools.product(*machine.band.values()):
        yield machine.with_constants(**dict(zip(machine.band, values, strict=True)))
