"""From a case and a machine to times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ep import _simulate
from megatron_ep.tools.simulate.case import Case
from megatron_ep.tools.simulate.machine import Machine

# Servers of a rank, as users know them.
SERVERS = {
    "sm": "stores and loads of the SMs",
    "memory": "memory of the GPU",
    "link_out": "NVLink, outgoing",
    "link_in": "NVLink, incoming",
    "card": "network card",
}
# A server that is busy for so much of the time is what a phase waits for.
BOTTLENECK = 0.75

# What has no role of the protocol's is the local pass.
LOCAL_PASS = "local pass"
# What warps of notify wait for where they wait for nothing of the protocol's: each of its steps begins when all warps
# of the rank have ended the one before.
MEETING = "the other warps of the rank"

Look = Callable[[str, float], None]


@dataclass(frozen=True)
class Role:
    """What the warps of a role did, of all simulated ranks. Times are in us, summed over these warps.

    copied: of it in copies and sums of rows.
    waited: by what they waited for.
    """

    warps: int
    time: float
    copied: float
    waited: dict[str, float]


@dataclass(frozen=True)
class Track:
    """A warp of the traced rank: us from the launch on, and its waits (what for, from, to)."""

    role: str
    channel: int
    sm: int
    begin: float
    end: float
    waits: list[tuple[str, float, float]]


@dataclass(frozen=True)
class Phase:
    """Notify, dispatch or combine.

    is_calibrated: whether measurements of it were among those that the machine's constants were fitted to.
    rail_rows: of the simulated ranks, rows that cross the network.
    peer_rows: likewise, rows that come to another rank: all in the normal mode, over NVLink in the low-latency mode.
    ends: us after which each simulated rank is done.
    busy: of the time, by server, of the rank where it is most.
    bytes_sent, row_bytes, messages: of all simulated network cards; those of rows, or counts, without those of flags.
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
    tracks: list[Track] = field(default_factory=list)

    def at(self, part: float) -> float:
        """The time of the rank at this part of all, by time: 0.5 the median, 1 the last."""
        ordered = sorted(self.ends)
        return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]

    @property
    def us(self) -> float:
        """Time of the slowest rank."""
        return max(self.ends)

    @property
    def bottleneck(self) -> str:
        server, share = max(self.busy.items(), key=lambda item: item[1])
        if share >= BOTTLENECK:
            return f"{SERVERS[server]}, busy {share:.0%} of the time"
        return f"latency: {SERVERS[server]} {'are' if server == 'sm' else 'is'} busiest, {share:.0%} of the time"


@dataclass(frozen=True)
class Prediction:
    """What a case takes on a machine.

    phases: dispatch with its layout known ("dispatch"), and combine.
    notify: the exchange of counts before a dispatch whose layout is not known; None in the low-latency mode, and where
        it ended badly. Nobody has measured it alone, so it is not calibrated.
    incidents: of waits that ended badly, as of an `EPError`.
    first: who gave up first, and why; None: nobody.
    ended_in: in which phase that was, which has no time, as those behind it.
    """

    case: Case
    machine: Machine
    phases: dict[str, Phase]
    notify: Phase | None
    incidents: list[dict[str, Any]]
    first: tuple[str, int] | None
    ended_in: str | None


def predict(
    case: Case, machine: Machine, *, trace_rank: int = -1, look: Look | None = None, choices: Any = None
) -> Prediction:
    """Simulates a dispatch, in the normal mode with its notify before, and its combine.

    trace_rank: whose warps have tracks in the result; -1: nobody's.
    look: called now and then with the phase and how much of it is done, 0 to 1.
    choices: as of `Case.choices`, if the caller has them.

    Raises ValueError for settings that no buffer could have; KeyboardInterrupt for Ctrl-C.
    """
    if case.uses_network and not machine.has_card:
        nodes = case.topology.nodes
        raise ValueError(f"machine is {machine.name}, which has no network card, but the case has {nodes} nodes")
    ids: list[torch.Tensor] = case.choices() if choices is None else choices
    mode = (_simulate.LowLatency if case.is_low_latency else _simulate.Transfers)(
        machine.compiled(), topk_idx=[each.data_ptr() for each in ids], settings=case.compiled_settings(trace_rank)
    )
    phases: dict[str, Phase] = {}
    notify = None
    ended_in = None
    for name in ("dispatch", "combine") if case.is_low_latency else ("notify", "dispatch", "combine"):

        def tell(rows: int, expected: int, name: str = name) -> None:
            if look is not None:
                look(name, rows / expected if expected else 0)

        found = getattr(mode, name)(tell)
        if mode.first_reason() is not None:
            ended_in = name
            break
        if name == "notify":
            notify = phase_of(found, 0, 0, is_calibrated=False)
            continue
        rows = (
            mode.arrivals(name == "combine")
            if isinstance(mode, _simulate.LowLatency)
            else (mode.rail_rows, mode.peer_rows)
        )
        phases[name] = phase_of(found, *rows, is_calibrated=True)
    incidents = [each for rank in range(case.simulated_ranks) for each in mode.incidents(rank)]
    return Prediction(case, machine, phases, notify, incidents, mode.first_reason(), ended_in)


def phase_of(found: dict[str, Any], rail_rows: int, peer_rows: int, *, is_calibrated: bool) -> Phase:
    """found: as the extension returns it."""
    return Phase(
        is_calibrated=is_calibrated,
        rail_rows=rail_rows,
        peer_rows=peer_rows,
        ends=[end / 1e3 for end in found["ends"]],
        roles={
            LOCAL_PASS if name == "launch" else name: Role(
                role["warps"],
                role["time"] / 1e3,
                role["copied"] / 1e3,
                {MEETING if wait == "nothing" else wait: ns / 1e3 for wait, ns in role["waited"].items()},
            )
            for name, role in found["roles"].items()
        },
        busy=found["busy"],
        bytes_sent=found["bytes_sent"],
        row_bytes=found["row_bytes"],
        messages=found["messages"],
        tracks=[
            Track(
                LOCAL_PASS if track["role"] == "launch" else track["role"],
                track["channel"],
                track["sm"],
                track["begin"] / 1e3,
                track["end"] / 1e3,
                [(wait, begin / 1e3, end / 1e3) for wait, begin, end in track["waits"]],
            )
            for track in found["tracks"]
        ],
    )


def machines_in_band(machine: Machine) -> Iterator[Machine]:
    """The ends between which a machine's constants of the network card lie."""
    if not machine.band:
        return
    for values in itertools.product(*machine.band.values()):
        yield machine.with_constants(**dict(zip(machine.band, values, strict=True)))
