"""The thread that looks after a buffer: it ends with the buffer, and keeps no process from ending."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection
from unittest import mock

import pytest
import torch.distributed as dist
from run_on import run_on
from waits import within

import megatron_ep as ep
from megatron_ep.buffer.monitor import Monitor
from megatron_ep.diagnosis.blame import ENDED, RankStatus
from megatron_ep.meeting.failure_broadcast import Failure, FailureBroadcast

W = 3


def monitors() -> int:
    return sum("monitor" in thread.name for thread in threading.enumerate())


@run_on("ranks")
def test_it_lives_as_long_as_its_buffer() -> None:
    config = ep.Config(num_experts=W)
    buffer = ep.Buffer(None, config)
    assert monitors() == 1
    buffer.reset()
    assert monitors() == 1
    buffer.close()
    buffer.close()
    assert monitors() == 0
    forgotten = ep.Buffer(None, config)
    memory = weakref.ref(forgotten)
    dist.barrier()
    del forgotten
    gc.collect()
    assert within(10, lambda: memory() is None and monitors() == 0), "nobody has it any more"
    for rank in range(W):
        alone = dist.new_group([rank])
        if rank == dist.get_rank():
            with ep.Buffer(alone, config):
                assert monitors() == 0, "there is nobody to look after"


OPEN_AT_THE_END = """
import sys, torch, torch.distributed as dist
import megatron_ep as ep
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
buffer = ep.Buffer(None, ep.Config(num_experts=2, timeout=30))
rows = ep.dispatch(torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), buffer=buffer)
print(len(rows.x), flush=True)
"""


def test_no_thread_keeps_a_process_from_ending(tmp_path) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN_AT_THE_END, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    said = [rank.stdout.readline() for rank in ranks]
    printed = time.monotonic()
    assert said == ["8\n", "0\n"]
    errors = [rank.communicate(timeout=30)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 2 and not any("Traceback" in error for error in errors), errors
    assert time.monotonic() - printed < 15


@run_on("ranks")
def test_it_ends_before_the_network() -> None:
    buffer, alive = ep.Buffer(None, ep.Config(num_experts=W)), []
    with mock.patch.object(buffer._group, "_network", mock.Mock(close=lambda: alive.append(monitors()))):
        buffer.close()
    assert alive == [0]


class LateBroadcast:
    """That rank 0 failed before a reset."""

    first: Failure | None = None

    def next_epoch(self) -> None:
        self.first = None

    def stop(self) -> None: ...


@run_on("ranks")
def test_what_was_heard_of_before_a_reset_is_nothing_to_those_that_have_reset() -> None:
    """Rank 1 hears of a failure when the others have cleared their memory, and before it clears its own."""
    buffer = ep.Buffer(None, ep.Config(num_experts=W))
    group, broadcast = buffer._group, LateBroadcast()
    start_anew = group._start_anew

    def start_late() -> None:
        broadcast.first = Failure(0, "failed", "rank 0 failed", "")
        time.sleep(0.8)
        start_anew()

    if buffer.rank == 1:
        group._monitor._broadcast = broadcast
        group._start_anew = start_late
    buffer.reset()
    assert not within(0.5, lambda: buffer._group.live_backend().aborted())
    buffer.close()


# ---- what it tells, and what it does when it hears


class Backend:
    """Stands for one of a machine of its own."""

    def __init__(self, masks: bool = False):
        self.masks = masks
        self.failed: tuple[str, int] | None = None
        self.reasons: list[str] = []

    def aborted(self) -> tuple[str, int] | None:
        return self.failed

    def ranks_that_left(self) -> list[int]:
        return []

    def settle_refusal(self, gone: Collection[int] = ()) -> None: ...

    def abort(self, *, interrupted: bool, failed: bool, reason: str) -> None:
        self.failed = ("failed", 0)
        self.reasons.append(reason)


class Owner:
    def describe(self, outcome: str, rank: int) -> Failure:
        return Failure(rank, outcome, f"rank {rank}: {outcome}", "")


@pytest.fixture
def pair():
    """Two ranks that share a store alone: the backend of one, and what the other one hears."""
    store, owner, made = dist.HashStore(), Owner(), []

    def make(**settings: bool) -> tuple[Backend, Monitor, FailureBroadcast]:
        backend = Backend(**settings)
        monitor = Monitor(backend, 0, {}, FailureBroadcast(store, 2), owner.describe)
        made.extend([monitor, FailureBroadcast(store, 2)])
        return backend, *made[-2:]

    yield make
    for each in made:
        each.stop()


class Ending(Backend):
    """Rank 0 waits for rank 2, which does its part and ends when it is looked at; rank 1 has done so before."""

    has_ended = False

    def rank_statuses(self) -> list[RankStatus]:
        done = self.has_ended
        self.has_ended = True
        return [
            RankStatus(rank, {"notify": 1}, {"notify": int(rank == 1 or (rank == 2 and done))}, [], "")
            for rank in range(3)
        ]


def test_a_rank_may_do_its_part_and_end(monkeypatch) -> None:
    backend, owner = Ending(), Owner()
    monkeypatch.setattr("megatron_ep.buffer.monitor.INTERVAL_S", 60.0)
    ended, ending = mock.Mock(fate=lambda: ENDED), mock.Mock(fate=lambda: ENDED if backend.has_ended else None)
    monitor = Monitor(backend, 0, {1: ended, 2: ending}, None, owner.describe)
    for _ in range(2):
        monitor._check()
    monitor.stop()
    assert backend.has_ended and backend.failed is None


def test_a_failure_is_told_though_nobody_asks(pair) -> None:
    backend, monitor, other = pair()
    backend.failed = ("timeout", 7)
    assert within(20, lambda: other.first and monitor.heard == other.first)
    assert other.first.cause == "rank 7: timeout" and backend.reasons == []
    with monitor.resetting():
        backend.failed = None
    other.next_epoch()
    assert not within(0.6, lambda: other.first or monitor.heard or backend.failed)
    backend.failed = ("failed", 0)
    assert within(20, lambda: other.first) and other.first.cause == "rank 0: failed"


def test_what_others_tell_ends_the_own_waits_once(pair) -> None:
    backend, monitor, other = pair()
    other.publish(Failure(3, "timeout", "rank 3 timed out first", ""))
    assert within(20, lambda: backend.reasons and monitor.heard == other.first)
    assert monitor.first(Failure(0, "failed", "its own", "")).cause == "rank 3 timed out first"
    assert not within(0.6, lambda: backend.reasons != ["rank 3 timed out first"])


@pytest.mark.parametrize(("outcome", "masks"), [("masked", False), ("timeout", True)])
def test_that_a_rank_is_masked_is_not_everybodys_failure(pair, outcome: str, masks: bool) -> None:
    backend, monitor, other = pair(masks=masks)
    backend.failed = (outcome, 0)
    assert monitor.first(Failure(0, outcome, "its own", "")).cause == "its own"
    assert not within(0.8, lambda: other.first)


def test_ranks_that_mask_others_are_not_ended(pair) -> None:
    backend, _, other = pair(masks=True)
    other.publish(Failure(3, "timeout", "rank 3 timed out first", ""))
    assert within(20, lambda: other.first) and not within(0.8, lambda: backend.failed)
