"""Why a call has ended, by what ranks say at first and later."""

import itertools
import time
from dataclasses import replace

import pytest

import megatron_ep as ep
from megatron_ep.diagnosis import blame, cause
from megatron_ep.errors import ERRORS, HOW_TO_GO_ON, error_of

NOBODY = {}.get


def seen_by_rank_0(*come, **changes):
    """What rank 0 of two machines finds out, to which these statuses come one after the other."""
    statuses = itertools.chain(come, itertools.repeat(come[-1]))
    ranks = cause.Ranks(
        world_size=2,
        statuses=lambda: next(statuses),
        fate=NOBODY,
        unheard=NOBODY,
        is_heard=lambda: False,
        when_waits_expire="after 5 s",
        have_others=True,
        spans_machines=True,
    )
    return replace(ranks, **changes)


def status(rank, incidents=(), reason="", sends=()):
    return blame.RankStatus(rank, {}, {}, list(incidents), reason, list(sends))


INCIDENT = {"role": "notify", "peer": 0, "waiting_for": "counts from a rank of this node", "call": 1}
SENT = {"counter": "transfer", "call": 3, "payload_type": 2, "payload_bytes": 8, "topk": 1}
SENT |= {"scale_bytes": 0, "weight_bytes": 0}
OTHER_ROW = {"outcome": "mismatch", "waiting_for": "nothing", "role": "receiver", "peer": 0, "call": 3}
FAILS = status(1, [OTHER_ROW], sends=[{**SENT, "kind": "dispatch"}])


def peer_of(outcome):
    return [status(1, [{**INCIDENT, "outcome": outcome}])]


@pytest.mark.parametrize(
    ("outcome", "early", "late", "says"),
    [
        ("failed", None, [status(1, reason="was told to stop: enough")], "rank 1 was told to stop: enough"),
        ("failed", None, [status(1, reason="KeyError: 3")], "rank 1 failed for a reason of its own: KeyError: 3"),
        ("bad_input", None, [status(1, reason="x is None")], "rank 1 refused its arguments: x is None"),
        ("lost", None, [status(1, reason="it was closed")], "the connection to rank 1 broke: it was closed"),
        (
            "lost",  # by whoever else lost it
            [status(1), status(2)],
            [status(1), status(2, reason="it was closed")],
            "the connection to rank 1 broke: it was closed",
        ),
        (
            "mismatch",
            None,
            peer_of("mismatch"),
            "rank 1 was sent counts of rows that no rank can have, by rank 0",
        ),
        (
            "mismatch",
            [status(0), FAILS],
            [status(0, sends=[{**SENT, "kind": "combine"}]), FAILS],
            "rank 1 met a row that was not meant for its call: in call 3 rank 0 sent a combine, H = 2, float32, K = 1; "
            "rank 1 sent a dispatch, H = 2, float32, K = 1",
        ),
        (
            "cut_off",
            None,
            peer_of("cut_off"),
            "rank 1 came too late: rank 0 took it for dead, has masked it and goes on without it",
        ),
        ("masked", None, peer_of("masked"), "rank 1 met rank 0 in a backward pass, masked since its forward pass"),
    ],
)
def test_a_cause_may_come_later_than_the_news(outcome, early, late, says, monkeypatch):
    """A third rank may tell of the failure first, or lose its connection first; a network may bring the end first."""
    monkeypatch.setattr(cause, "NEWS_S", 60)
    ranks = seen_by_rank_0(early or [status(1)], late)
    assert not cause.cause_by(early or [status(1)], outcome, 1, ranks).is_whole
    assert cause.find(outcome, 1, ranks) == says


@pytest.mark.parametrize("outcome", ["interrupted", "no_layout", "overflow"])
def test_causes_to_which_nothing_can_come(outcome):
    assert cause.cause_by([], outcome, 1, seen_by_rank_0([])).is_whole


def test_a_timeout_is_whole_once_everybody_who_runs_has_said_what_it_waits_for():
    calls = {"notify": 1, "transfer": 1, "dispatch_sent": 0, "combine_sent": 0}
    inside = blame.RankStatus(1, {**calls, "notify": 2}, calls, [], "")
    waits = blame.RankStatus(0, {**calls, "notify": 2}, calls, [{**INCIDENT, "outcome": "timeout", "peer": 1}], "")
    said = "rank 0 timed out first, after 5 s: rank 1 is in notify 2 and does not go on"
    seen = seen_by_rank_0([waits, inside])
    assert cause.cause_by([waits, inside], "timeout", 0, seen) == (said, False)
    gone = replace(seen, fate={1: "has ended"}.get)
    assert cause.cause_by([waits, inside], "timeout", 0, gone) == (f"{said}; the process of rank 1 has ended", True)
    assert cause.cause_by([], "timeout", 0, seen) == ("rank 0 timed out first, after 5 s", False)


def test_nobody_waits_longer_than_news_take(monkeypatch):
    monkeypatch.setattr(cause, "NEWS_S", 0.05)
    assert cause.find("cut_off", 1, seen_by_rank_0([status(1)])).startswith("rank 1 came too late: another rank took")
    monkeypatch.setattr(cause, "NEWS_S", 60)
    heard = iter([False, False, True])
    started = time.monotonic()
    failed = "rank 1 failed for a reason of its own"
    assert cause.find("failed", 1, seen_by_rank_0([], is_heard=lambda: next(heard))) == failed
    assert cause.find("failed", 1, seen_by_rank_0([], have_others=False)) == failed, "all ranks are in this process"

    def broken():
        raise RuntimeError("this GPU does not answer")

    assert cause.find("failed", 1, seen_by_rank_0([], statuses=broken)) == failed
    assert time.monotonic() - started < 30


def test_the_error_of_a_cause():
    incident = {"outcome": "timeout", "rank": 0, "role": "receiver", "channel": 1, "call": 2, "peer": 1}
    incident |= {"waiting_for": "a row", "seen": 0, "expected": 1}
    own = "rank 0, receiver, channel 1, call 2: waited for a row from rank 1: seen 0, expected 1"
    backward = "in the backward pass of combine"
    error = error_of("timeout", "why", [incident], heard="rank 1, notify", backward_pass=backward)
    asks = f"{backward}: does the loss contain its output on all ranks?"
    assert str(error).split("\n  ") == ["why", "rank 1, notify", own, asks, HOW_TO_GO_ON]
    assert error.incidents == [incident]
    assert str(error_of("timeout", "why", [incident], heard=own)).count(own) == 1
    assert type(error_of("interrupted", "why", [])) is ep.EPAbortError
    assert {outcome: type(error_of(outcome, "why", [])) for outcome in ERRORS} == ERRORS
