"""Finds the rank that caused a timeout. A wait names only the next hop, which may itself be waiting.

Every rank publishes the numbers of its calls, and what its roles were waiting for when they gave up. The waits are
followed from the rank that gave up first to a rank that waits for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NAMED = 8  # ranks, in a message

# Fates of a process:
ENDED = "has ended"  # nothing is left of it
CLOSED = "has closed its buffer"  # it runs
LEFT = f"{ENDED}, or closed its buffer"  # it is on another machine and has signed off

# Prefix of the reason of a rank that gives up because of another rank's process.
STOPPED_WAITING = "stopped waiting: "


@dataclass(frozen=True)
class RankStatus:
    """The state of a rank that other ranks can read.

    entered, finished: number of the last call of each kind, from 1: "notify"; "transfer" (dispatches and combines
        together, also in one hop); of all low-latency modes "dispatch_sent", "combine_sent", and "dispatch_received",
        "combine_received", which may come in another order. A call that had been given up before the rank came to it
        is not entered.
    incidents: see `errors.EPError`.
    reason: argument of `Buffer.abort` on that rank, or the text of the error that stopped it; "" for none.
    sends: what its last calls sent, with the keys counter (as of `entered`), call (modulo 2^16), kind, payload_type,
        payload_bytes, topk, weight_bytes, scale_bytes.
    refused: its last refused calls, each as `_C.RankLauncher.note_refusal` was given it; 0: none.
    """

    rank: int
    entered: Mapping[str, int]
    finished: Mapping[str, int]
    incidents: Sequence[dict[str, Any]]
    reason: str
    sends: Sequence[Mapping[str, Any]] = ()
    refused: Sequence[int] = ()

    @property
    def inside(self) -> str | None:
        """The kind of call that the rank has begun and not finished."""
        return next((kind for kind, number in self.entered.items() if number != self.finished[kind]), None)

    @property
    def call(self) -> str | None:
        """The name of that call."""
        return None if self.inside is None else str(_Step(self.inside, self.entered[self.inside]))

    @property
    def begun(self) -> int:
        """The number of calls of the normal mode, which all ranks make in the same order."""
        return self.entered["notify"] + self.entered["transfer"]

    @property
    def launches(self) -> int:
        """The number of launches that all ranks make in the same order."""
        return self.begun + self.entered["dispatch_sent"] + self.entered["combine_sent"]


@dataclass(frozen=True)
class _Step:
    """A call in which, or for which, a rank waits."""

    counter: str
    number: int

    def __str__(self) -> str:
        kind, _, half = self.counter.partition("_")
        return f"low-latency {kind} {self.number}" if half else f"{NAMES[kind]} {self.number}"

    @property
    def verb(self) -> str:
        return "sent" if "sent" in self.counter else "entered"


NAMES = {"notify": "notify", "transfer": "call"}


def root(
    first: int,
    statuses: Sequence[RankStatus],
    fate: Callable[[int], str | None],
    unheard: Callable[[int], tuple[str, float] | None] = lambda _: None,
) -> str | None:
    """Returns a clause that names the rank that all others wait for, and its progress; None if it cannot be found.

    first: rank whose wait expired first.
    statuses: status of each reachable rank.
    fate: returns what became of a rank's process, such as "has ended"; None if nothing is known.
    unheard: returns a rank's machine and the seconds since it last answered; None if it answers.
    """
    known = {status.rank: status for status in statuses}
    waiting, path = first, list[int]()
    while waiting in known and known[waiting].incidents:
        path.append(waiting)
        step, candidates = _waits(known[waiting], known)
        silent = [rank for rank in candidates if rank in known and not known[rank].incidents]
        missing = [rank for rank in silent if known[rank].inside or _is_behind(known[rank], step)]
        # A rank that ended silently will not come, so it is named first. A rank that gave up earlier is not the cause.
        absent = [s.rank for s in statuses if not s.incidents and (s.inside or _is_behind(s, step))]
        ended = [rank for rank in absent if fate(rank)]
        lost = {rank: since for rank in absent if (since := unheard(rank))}
        if lost and not ended:
            return _out_of_reach(lost)
        missing = ended or missing
        if missing:
            return _sentence(missing, step, known, fate)
        following = [rank for rank in candidates if rank in known and rank not in silent]
        if not following:
            unknown = [rank for rank in candidates if rank not in known]
            if unknown:
                return f"{named(unknown[:1])}, of which no more is known here"
            return f"{_sentence(silent, step, known, fate)}, but rank {waiting} misses it" if silent else None
        waiting = next((rank for rank in following if rank not in path), following[0])
        if waiting in path:  # ranks before it in the path only wait for this cycle
            return f"{named(sorted(path[path.index(waiting) :]))} wait for each other in {step}"
    return None


def ended(waiting: RankStatus, statuses: Sequence[RankStatus], fate: Callable[[int], str | None]) -> str | None:
    """Names the ranks whose processes have ended while a rank's call needs them; returns None if there are none.

    A rank that did its part of the call before it ended is not named.

    fate: see `root`.
    """
    if waiting.inside is None:
        return None
    step = _Step(waiting.inside.replace("received", "sent"), waiting.entered[waiting.inside])
    others = [s for s in statuses if s.rank != waiting.rank and (s.inside or _is_behind(s, step))]
    gone = [s.rank for s in others if fate(s.rank) in (ENDED, CLOSED, LEFT)]
    return _sentence(gone, step, {s.rank: s for s in statuses}, fate) if gone else None


def _waits(status: RankStatus, known: Mapping[int, RankStatus]) -> tuple[_Step, list[int]]:
    """Returns the call that this rank waits in, and the ranks that it may wait for: those that have begun fewer calls,
    the slowest one first, or the peers of its waits if there are none."""
    incidents = sorted(status.incidents, key=lambda incident: incident["outcome"] == "aborted")
    peers = list(dict.fromkeys(i["peer"] for i in incidents if i["peer"] not in (status.rank, -1)))
    incident = incidents[0]
    counter = counter_of(incident["role"])
    if "sent" in counter:
        return _Step(counter, incident["call"]), peers
    late = sorted((rank for rank in known if known[rank].begun < status.begun), key=lambda rank: known[rank].begun)
    return _Step(counter, status.entered[counter]), late or peers


def counter_of(role: str) -> str:
    """Returns the kind of calls, see `RankStatus`, that a rank must send for this role of another one to go on."""
    if role.startswith("low_latency"):
        return "combine_sent" if "combine" in role else "dispatch_sent"
    return "notify" if role == "notify" else "transfer"


def _is_behind(status: RankStatus, step: _Step) -> bool:
    return status.entered[step.counter] < step.number


def _sentence(
    ranks: Sequence[int], step: _Step, known: Mapping[int, RankStatus], fate: Callable[[int], str | None]
) -> str:
    """Returns a clause that says what the first of these ranks has not done, and names others at the same point."""
    first = known[ranks[0]]
    alike = [rank for rank in ranks if known[rank].entered == first.entered and known[rank].inside == first.inside]
    several = len(alike) > 1
    if first.inside:
        text = f"{'are' if several else 'is'} in {first.call} and {'do' if several else 'does'} not go on"
    elif not _is_behind(first, step):
        text = f"{'have' if several else 'has'} done all of {step}"
    else:
        text = (
            f"{'have' if several else 'has'} not {step.verb} {step} "
            f"({'they' if several else 'it'} finished {first.finished[step.counter]})"
        )
    ends = fate(ranks[0])
    return f"{named(alike)} {text}" + (f"; the process of rank {ranks[0]} {ends}" if ends else "")


def _out_of_reach(unheard: Mapping[int, tuple[str, float]]) -> str:
    machines = list(dict.fromkeys(machine for machine, _ in unheard.values()))
    seconds = min(seconds for _, seconds in unheard.values())
    return (
        f"nothing was heard from {named(list(unheard))} ({', '.join(machines[:MAX_NAMED])}) for {seconds:.0f} s: the "
        f"network between, or {'those machines' if len(machines) > 1 else 'that machine'}"
    )


def named(ranks: Sequence[int]) -> str:
    """Lists at most MAX_NAMED of the ranks."""
    return "rank " + ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
