"""Who is to blame for a wait that took too long: not the next hop that the wait names, but the rank that never came.

Every rank counts its calls where the others can read it, and writes there what its roles were waiting for when they
gave up. From the rank that gave up first the waits are followed until one is reached who waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NAMED = 8  # ranks, in a message

# What a low-latency role waits for that a receiving half brings; all else comes from sending halves.
RELEASE = "a low-latency bank to be received"


ENDED = "has ended"  # what has become of a process that nothing is left of
LEFT = f"{ENDED}, or closed its buffer"  # of one of another machine that has said goodbye

# How the reason begins of a rank that gives up because of another one's process.
STOPPED_WAITING = "stopped waiting: "


@dataclass(frozen=True)
class RankStatus:
    """What others can see of a rank.

    entered, finished: the number of the last call of each kind, from 1: "notify"; "transfer" (dispatches and combines
        together); of the low-latency mode "dispatch_sent", "combine_sent", and, for receiving halves of even and of odd
        numbers, "dispatch_received_0", "dispatch_received_1", "combine_received_0", "combine_received_1". A rank that
        came to a call after it had been given up did not enter it.
    incidents: see `errors.EPError`.
    reason: given to `Buffer.abort` there, or the text of the error that ended its part; "" for none.
    sends: in its last calls: counter (as of `entered`), call (modulo 2^16), kind, payload_type, payload_bytes, topk,
        weight_bytes, scale_bytes.
    """

    rank: int
    entered: Mapping[str, int]
    finished: Mapping[str, int]
    incidents: Sequence[dict[str, Any]]
    reason: str
    sends: Sequence[Mapping[str, Any]] = ()

    @property
    def inside(self) -> str | None:
        """The kind of call that it has begun and not finished."""
        return next((kind for kind, number in self.entered.items() if number > self.finished[kind]), None)

    @property
    def call(self) -> str | None:
        """The name of that call."""
        return None if self.inside is None else str(_Step(self.inside, self.entered[self.inside]))

    @property
    def begun(self) -> int:
        """Calls of the normal mode, of which all ranks make the same in the same order."""
        return self.entered["notify"] + self.entered["transfer"]


@dataclass(frozen=True)
class _Step:
    """A call that is being waited in or for."""

    counter: str
    number: int

    def __str__(self) -> str:
        kind, _, half = self.counter.partition("_")
        return f"low-latency {kind} {self.number}" if half else f"{NAMES[kind]} {self.number}"

    @property
    def verb(self) -> str:
        return "received" if "received" in self.counter else "sent" if "sent" in self.counter else "entered"


NAMES = {"notify": "notify", "transfer": "call"}


def root(
    first: int,
    statuses: Sequence[RankStatus],
    fate: Callable[[int], str | None],
    unheard: Callable[[int], tuple[str, float] | None] = lambda _: None,
) -> str | None:
    """The rank that all others wait for, and how far it got, as a clause; None where that cannot be told.

    Args:
        first: the rank whose wait expired first.
        statuses: of all ranks in reach.
        fate: what has become of a rank's process, "has ended" say; None: nothing that is known.
        unheard: a rank's machine, and for how many seconds it has answered nothing; None: it answers.
    """
    known = {status.rank: status for status in statuses}
    waiting, path = first, list[int]()
    while waiting in known and known[waiting].incidents:
        path.append(waiting)
        step, candidates = _waits(known[waiting], known)
        silent = [rank for rank in candidates if rank in known and not known[rank].incidents]
        missing = [rank for rank in silent if known[rank].inside or _is_behind(known[rank], step)]
        # A rank that ended without a word will not come, so it is named first. One that gave up before is not to blame.
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
        if waiting in path:  # those before it only wait for the ring
            return f"{named(sorted(path[path.index(waiting) :]))} wait for each other in {step}"
    return None


def ended(waiting: RankStatus, statuses: Sequence[RankStatus], fate: Callable[[int], str | None]) -> str | None:
    """Names the ranks that a rank in a call waits for, or will, and whose processes have ended; None if there are none.

    A rank that did its part before it ended is not waited for.

    fate: as for `root`.
    """
    if waiting.inside is None:
        return None
    counter = f"{waiting.inside.partition('_')[0]}_sent" if "_" in waiting.inside else waiting.inside
    step = _Step(counter, waiting.entered[waiting.inside])
    others = [s for s in statuses if s.rank != waiting.rank and (s.inside or _is_behind(s, step))]
    gone = [s.rank for s in others if fate(s.rank) in (ENDED, LEFT)]
    return _sentence(gone, step, {s.rank: s for s in statuses}, fate) if gone else None


def _waits(status: RankStatus, known: Mapping[int, RankStatus]) -> tuple[_Step, list[int]]:
    """The call that this rank waits in, and the ranks that it may wait for: those who have begun fewer calls, the last
    of them first; if there are none, the peers of its waits."""
    incidents = sorted(status.incidents, key=lambda incident: incident["outcome"] == "aborted")
    peers = list(dict.fromkeys(i["peer"] for i in incidents if i["peer"] not in (status.rank, -1)))
    incident = incidents[0]
    if incident["role"].startswith("low_latency"):
        kind = "combine" if "combine" in incident["role"] else "dispatch"
        if incident["waiting_for"] == RELEASE:
            received = _Step(f"{kind}_received_{incident['expected'] % 2}", incident["expected"])
            is_late = any(_is_behind(known[rank], received) for rank in peers if rank in known)
            if kind == "combine" or is_late:
                return received, peers
            return _Step("dispatch_sent", received.number + 1), peers  # which tells it over a network
        return _Step(f"{kind}_sent", incident["call"]), peers
    counter = "notify" if incident["role"] == "notify" else "transfer"
    late = sorted((rank for rank in known if known[rank].begun < status.begun), key=lambda rank: known[rank].begun)
    return _Step(counter, status.entered[counter]), late or peers


def _is_behind(status: RankStatus, step: _Step) -> bool:
    return status.entered[step.counter] < step.number


def _sentence(
    ranks: Sequence[int], step: _Step, known: Mapping[int, RankStatus], fate: Callable[[int], str | None]
) -> str:
    """What the first of these ranks has not done, and which others have got no further."""
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
    """At most MAX_NAMED of them."""
    return "rank " + ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
