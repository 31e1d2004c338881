"""Says why calls have ended: the first line of their error, which names the rank that gave up first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_ep.diagnosis import blame, disagreement
from megatron_ep.diagnosis.blame import RankStatus

# Seconds in which ranks in a call publish what they waited for, after it was given up.
ANSWER_S = 1.0
# Seconds by which what other ranks say of a failure may come later than the failure, for example over a network.
NEWS_S = 3.0
ABORTED_BY_CALLER = "was told to stop: "  # prefix of the reason of `Buffer.abort`


@dataclass(frozen=True)
class Ranks:
    """What a process can find out about the ranks of a buffer.

    statuses: returns the status of each reachable rank. Raises RuntimeError if a GPU no longer answers.
    fate, unheard: see `blame.root`.
    is_heard: returns whether another rank has told of the failure.
    when_waits_expire: as a phrase, such as "after 5 s".
    have_others: whether other processes have ranks, which may say more later.
    spans_machines: whether some ranks are reached over a network only.
    """

    world_size: int
    statuses: Callable[[], Sequence[RankStatus]]
    fate: Callable[[int], str | None]
    unheard: Callable[[int], tuple[str, float] | None]
    is_heard: Callable[[], bool]
    when_waits_expire: str
    have_others: bool
    spans_machines: bool


class Cause(NamedTuple):
    """is_whole: whether later statuses of other ranks add nothing."""

    text: str
    is_whole: bool = True


def find(outcome: str, rank: int, ranks: Ranks) -> str:
    """Returns why a rank gave up. Waits until nothing is missing in it, or until this process hears it: a network may
    bring the end of a call first, because a third rank passes it on.

    outcome, rank: see `Backend.aborted`.
    """
    seconds = ANSWER_S if outcome == "timeout" else NEWS_S
    deadline = time.monotonic() + (seconds if ranks.have_others else 0.0)
    while True:
        try:
            statuses = ranks.statuses()
        except RuntimeError:
            return cause_by([], outcome, rank, ranks).text
        cause = cause_by(statuses, outcome, rank, ranks)
        if cause.is_whole or ranks.is_heard() or time.monotonic() > deadline:
            return cause.text
        time.sleep(1e-3)


def cause_by(statuses: Sequence[RankStatus], outcome: str, rank: int, ranks: Ranks) -> Cause:
    """Returns why a rank gave up, by these statuses of reachable ranks."""
    own = [status for status in statuses if status.rank == rank]
    incidents = [i for status in own for i in status.incidents if i["outcome"] == outcome]
    if outcome == "timeout":
        return _timeout(statuses, rank, ranks)
    if outcome == "mismatch":
        return _mismatch(statuses, rank, incidents, ranks)
    if outcome in ("bad_input", "failed", "lost"):
        # Another rank may have lost its connection to that rank.
        reasons = [status.reason for status in (*own, *(statuses if outcome == "lost" else ()))]
        return _reason(outcome, rank, next(filter(None, reasons), ""))
    peer = f"rank {incidents[0]['peer']}" if incidents else "another rank"
    if outcome == "cut_off":
        said = f"rank {rank} came too late: {peer} took it for dead, has masked it and goes on without it"
        return Cause(said, bool(incidents))
    if outcome == "masked":
        return Cause(f"rank {rank} met {peer} in a backward pass, masked since its forward pass", bool(incidents))
    return Cause(
        {
            "interrupted": f"rank {rank} was interrupted",
            "no_layout": f"rank {rank} used the handle of a dispatch that failed",
            "overflow": f"rank {rank} had no room for the rows that pass through it: max_recv_tokens is less than the "
            "tokens that ranks of other nodes send through it",
        }[outcome]
    )


def _timeout(statuses: Sequence[RankStatus], rank: int, ranks: Ranks) -> Cause:
    root = blame.root(rank, statuses, ranks.fate, ranks.unheard)
    silent = [status.rank for status in statuses if status.inside and not status.incidents]
    is_known = any(status.rank == rank for status in statuses)
    return Cause(
        f"rank {rank} timed out first, {ranks.when_waits_expire}" + (f": {root}" if root else ""),
        is_known and all(ranks.fate(other) or ranks.unheard(other) for other in silent),
    )


def _mismatch(statuses: Sequence[RankStatus], rank: int, incidents: Sequence[dict[str, Any]], ranks: Ranks) -> Cause:
    if incidents and incidents[0]["waiting_for"] != "nothing":
        return Cause(f"rank {rank} was sent counts of rows that no rank can have, by rank {incidents[0]['peer']}")
    sent = disagreement.what_ranks_sent(rank, statuses, ranks.world_size)
    may_come = sent.endswith(disagreement.UNKNOWN) and (ranks.spans_machines or not incidents)
    return Cause(f"rank {rank} met a row that was not meant for its call: {sent}", not may_come)


def _reason(outcome: str, rank: int, reason: str) -> Cause:
    """reason: see `RankStatus`."""
    if outcome == "failed" and reason.startswith((ABORTED_BY_CALLER, blame.STOPPED_WAITING)):
        return Cause(f"rank {rank} {reason}")
    said = {
        "bad_input": f"rank {rank} refused its arguments",
        "failed": f"rank {rank} failed for a reason of its own",
        "lost": f"the connection to rank {rank} broke",
    }[outcome]
    return Cause(f"{said}: {reason}") if reason else Cause(said, False)
