"""Odd ranks do something else than even ones: nobody ever gets rows that were meant for another call, and the error
says what each rank sent."""

import re

import pytest
import torch
from modes import HOST, MODES
from run_on import run_on

import megatron_ep as ep

GIVEN = dict(hidden=8, dtype="float32", topk=2, weights="float32")
OTHERS = {  # what odd ranks give instead
    "hidden": dict(hidden=5),
    "dtype": dict(hidden=16, dtype="bfloat16"),
    "topk": dict(topk=3),
    "weights": dict(weights=None),
    "weight dtype": dict(weights="float64"),
}
REFUSED = r"rank . met a row that was not meant for its call|timed out"


def described(hidden, dtype, topk, weights):
    return f"a dispatch, H = {hidden}, {dtype}, K = {topk}" + (f", weights of {weights}" if weights else "")


def tensors(rank, hidden, dtype, topk, weights):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(9, 8, generator=generator).topk(topk, dim=1).indices
    factors = torch.ones(9, topk, dtype=getattr(torch, weights)) if weights else None
    return torch.ones(9, hidden, dtype=getattr(torch, dtype)), ids, factors


def calls_of(mode, nodes=2):
    """In the low-latency mode some rank meets such a row; in the normal one all may wait for rows instead."""
    # In one hop between nodes another rank may meet the row first, and chance decides whether this one hears of it.
    return MODES[mode](HOST, 1 if mode == "one hop" else nodes, 20.0 if mode == "low latency" else None)


def check_said(mode, error, even, odd):
    """Ranks that had not come to the call have sent nothing."""
    if "met a row" not in error and mode != "low latency":
        return
    first = error.splitlines()[0]
    said = {
        int(rank): text
        for ranks, text in re.findall(r"rank ([\d, ]+) sent ([^;]*)", first)
        for rank in ranks.split(", ")
    }
    assert " in call " in first and {rank % 2 for rank in said} == {0, 1}, error
    assert all(text == (even, odd)[rank % 2] for rank, text in said.items()), error


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("mode", MODES)
@run_on("ranks")
def test_tensors_that_differ(mode, kind):
    calls, odd = calls_of(mode), GIVEN | OTHERS[kind]
    given = tensors(calls.rank, **(odd if calls.rank % 2 else GIVEN))
    with pytest.raises(ep.EPError, match=REFUSED) as error:
        for _ in range(2):  # a rank that saw no difference hears of it in the second
            calls.dispatch(*given)
    check_said(mode, str(error.value), described(**GIVEN), described(**odd))
    calls.is_usable_again()


# ---- other calls


def call_differently(calls, kind):
    buffer, odd = calls.buffer, calls.rank % 2
    x, ids, weights = tensors(calls.rank, **GIVEN)
    if kind == "rows of before a reset":  # which lie where those of the last dispatch are to be, with its number
        for repeated in (False, True):
            for last in (False, False, True):
                rows = calls.dispatch(x.repeat(1, 4), ids, weights)
                is_narrow = repeated and last and odd
                ep.combine(rows.x[:, :8].contiguous() if is_narrow else rows.x, rows.handle)
            if not repeated:
                buffer.reset()
        return
    first = calls.dispatch(x, ids, weights)
    if kind == "weights of combine":
        ep.combine(first.x, first.handle, first.probs if odd else None)
    elif kind == "sum_at":
        calls.mode.combine(first.x, first.handle, sum_at="token" if odd else "expert")
        calls.dispatch(x, ids, weights)  # a rank that saw no difference hears of it now
    else:
        if kind == "handle of before a reset":
            buffer.reset()
            ids = ids.flip(0).contiguous()
        second = calls.dispatch(x, ids, weights)
        if kind == "other call":
            ep.dispatch(x, handle=second.handle) if odd else ep.combine(second.x, second.handle)
        else:
            ep.dispatch(x, handle=(first if odd else second).handle)


SENT = {  # by even ranks, by odd ones
    "weights of combine": ("a combine, H = 8, float32, K = 2", "a combine with weights, H = 8, float32, K = 2"),
    "other call": ("a combine, H = 8, float32, K = 2", "a dispatch, H = 8, float32, K = 2"),
    "sum_at": ("a combine with sum_at='expert', H = 8, float32, K = 2", "a combine, H = 8, float32, K = 2"),
}
KINDS = ["weights of combine", "other call", "other handle", "handle of before a reset", "rows of before a reset"]
OTHER_CALLS = [("low latency", "sum_at"), *((mode, kind) for mode in ("normal", "one hop") for kind in KINDS)]


@pytest.mark.parametrize(("mode", "kind"), OTHER_CALLS)
@run_on("ranks")
def test_calls_that_differ(mode, kind):
    calls = calls_of(mode, 1 if kind == "rows of before a reset" else 2)
    for _ in range(3 if kind == "rows of before a reset" else 1):
        with pytest.raises(ep.EPError, match=REFUSED) as error:
            call_differently(calls, kind)
        if kind in SENT:
            check_said(mode, str(error.value), *SENT[kind])
        calls.buffer.reset()
    calls.is_usable_again()
