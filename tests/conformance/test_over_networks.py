"""What holds over every fabric: the bits of one process in both modes; and between machines, errors on all of them.
The machines are this one, under several names, and the cards those of tests/csrc/fake_ibverbs.cpp."""

import errno
import os
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cards import cards_with
from nightly import at_night
from over_networks import IDS, W, X, buffer_of, run_cases
from run_on import run_on
from waits import within

import megatron_ep as ep
from megatron_ep.buffer import monitor, rank_group
from megatron_ep.fabrics import choice

FABRICS = choice.OF_HOST


@pytest.mark.parametrize(
    ("fabric", "per_machine", "per_node"),
    [
        ("", W, 2),
        ("tcp", 1, 1),
        ("tcp", 2, 1),
        ("verbs", 2, 2),
        ("mlx5", 2, 1),
        at_night("tcp", 2, 2),
        at_night("verbs", 1, 1),
        at_night("verbs", 2, 1),
        at_night("mlx5", 1, 1),
        at_night("mlx5", 2, 2),
    ],
)
@pytest.mark.parametrize("seeds", [range(2), at_night(range(2, 4))], ids=["two", "two more"])
def test_random_cases_have_the_bits_of_one_process(over, fabric, per_machine, per_node, seeds):
    over(fabric, run_cases, fabric, per_machine, per_node, seeds)


@pytest.mark.parametrize("fabric", FABRICS)
@run_on("ranks")
def test_an_abort_is_heard_on_every_machine() -> None:
    with buffer_of() as buffer:
        ep.dispatch(X, IDS, buffer=buffer)
        dist.barrier()
        if dist.get_rank() == W - 1:
            buffer.abort("enough")
        start = time.monotonic()
        with pytest.raises(ep.EPError, match=r"^rank 3 was told"):
            ep.dispatch(X, IDS, buffer=buffer)
        assert time.monotonic() - start < 10
        buffer.reset()
        rows = ep.dispatch(X, IDS, buffer=buffer).x
        assert torch.equal(rows, torch.ones(rows.shape))


@pytest.mark.parametrize("fabric", FABRICS)
@run_on("ranks")
def test_a_rank_that_has_done_its_part_may_close_its_buffer() -> None:
    buffer = buffer_of()
    rows = ep.dispatch(X, IDS, buffer=buffer)
    ep.combine(rows.x, rows.handle)
    if dist.get_rank() != W - 1:
        assert within(10, lambda: W - 1 in buffer._group._network.nic.ranks_that_left())
        time.sleep(3 * monitor.INTERVAL_S)
        buffer.raise_if_failed()
    buffer.close()


@pytest.mark.parametrize("fabric", ["", "mlx5"])
@run_on("ranks")
def test_buffers_leave_no_descriptor_and_no_thread() -> None:
    """Buffers that are closed, released, closed after a reset or after a failure, and left to the garbage collector."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def use(end: str) -> None:
        buffer = buffer_of(30)
        mode = ep.LowLatency(buffer, max_tokens=8, hidden=16, topk=2, dtype=torch.float32)
        rows, received = ep.dispatch(X, IDS, buffer=buffer), mode.dispatch(X, IDS)
        ep.combine(rows.x, rows.handle)
        mode.combine(received.x, received.handle)
        if end == "failure":
            dist.barrier()
            buffer.abort("enough")
        if end == "reset":
            buffer.reset()
        if end != "garbage":
            (buffer.release if end == "release" else buffer.close)()

    before = (0, 0)
    for _ in range(2):
        for end in ("close", "release", "reset", "failure", "garbage"):
            use(end)
            dist.barrier()
        before = before if any(before) else held()
    assert within(10, lambda: held() <= before), (before, held())


# ---- over cards


SAYS_NOTHING = "confirmed nothing of what was sent"


@pytest.mark.parametrize(
    ("fabric", "facts", "what"),
    [
        ("verbs", dict(silent_after=0), SAYS_NOTHING),
        ("verbs", dict(unposted=errno.ENOMEM), "ibv_post_send: Cannot allocate memory"),
        # Rank 1's own connection is in an error, too: whoever sees its own first says so.
        ("verbs", dict(refused_after=0), "the other card refused access to memory|was in an error already"),
        ("mlx5", dict(silent_after=0), SAYS_NOTHING),
        ("mlx5", dict(refused_after=0), r"broke: fake_0 port 1 \(10\.99\.0\.1\)"),
    ],
)
@run_on("ranks")
def test_a_card_that_fails_is_named_on_every_rank(fabric: str, facts: dict[str, int], what: str) -> None:
    """The card of rank 1 does what it should not, then it is in order again."""
    with buffer_of(30) as buffer:
        expected = ep.dispatch(X, IDS, buffer=buffer).x
        dist.barrier()
        with cards_with(retry_ms=500, **facts if dist.get_rank() == 1 else {}):
            start = time.monotonic()
            with pytest.raises(ep.EPError) as caught:
                for _ in range(2):  # in the first one a rank may have all that it needs before it hears
                    ep.dispatch(X, IDS, buffer=buffer)
            assert time.monotonic() - start < 15
            dist.barrier()
        buffer.reset()
        assert torch.equal(ep.dispatch(X, IDS, buffer=buffer).x, expected)
    text = str(caught.value)
    assert "broke" in text and "rank" in text and re.search(what, text), text
    assert what != SAYS_NOTHING or "fake_0 port 1 (10.99.0.1)" in text, text
    assert fabric == "verbs" or text.startswith("the connection to rank"), text


IS_DOWN = "fake_0 port 1 (RoCE): it is down on rank 2"


@pytest.mark.parametrize(
    ("fabric", "facts", "what"),
    [
        ("verbs", dict(unregistered=errno.EPERM), "fake_0 port 1: ibv_reg_mr: Operation not permitted"),
        ("verbs", dict(down=1), IS_DOWN),
        ("verbs", dict(devices=0), "libibverbs finds no network card on rank 2"),
        ("verbs", dict(network=9), "10.99.9.1"),
        ("mlx5", dict(mlx5=0), "fake_0 port 1 (RoCE): it is no card of the driver mlx5 on rank 2"),
        ("mlx5", dict(down=1), IS_DOWN),
        ("mlx5", dict(stride=128), "its driver keeps queues in another form than mlx5's on rank 2"),
        ("mlx5", dict(network=9), "10.99.9.1"),
    ],
)
@run_on("ranks")
def test_a_card_that_cannot_be_used_is_refused_on_every_rank(facts: dict[str, int], what: str) -> None:
    """That of rank 2."""
    with cards_with(**facts if dist.get_rank() == 2 else {}), pytest.raises(ep.EPError, match=re.escape(what)):
        buffer_of()


@pytest.mark.parametrize("fabric", FABRICS)
@run_on("ranks")
def test_one_line_at_the_start_names_fabric_and_card(fabric: str) -> None:
    """Rank 0 logs it."""
    with mock.patch.object(rank_group.set_up_log, "info") as say:
        buffer_of().close()
    said = [call.args[0] % call.args[1:] for call in say.call_args_list]
    card = "" if fabric == "tcp" else "; rank 0 has fake_0 port 1"
    says = f"fabric: {fabric} (host backend on 4 machines, MEGATRON_EP_FABRIC says so{card});"
    assert [says in line for line in said] == ([True] if dist.get_rank() == 0 else [])
