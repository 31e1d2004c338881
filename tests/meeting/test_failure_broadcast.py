"""Ranks that share no memory hear of each other's failures through the store that they met in.

A machine here is a host name: memory of ranks of another one is not mapped, but stands for itself, as in a network that
carries nothing. So each rank waits in its first call until somebody gives up.
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import threading
import time
from multiprocessing.connection import Connection
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_processes import LinkedProcess
from waits import within

import megatron_ep as ep
from megatron_ep import _C
from megatron_ep.buffer.interface import Backend
from megatron_ep.errors import HOW_TO_GO_ON
from megatron_ep.meeting import codec, failure_broadcast
from megatron_ep.meeting.failure_broadcast import Failure, FailureBroadcast
from megatron_ep.meeting.processes import process_fate

SAID = Failure(3, "timeout", "rank 3 timed out first", "rank 3, notify: waited")

W = 4


def near(rank: int) -> range:
    """The ranks of its machine."""
    return range(rank // 2 * 2, rank // 2 * 2 + 2)


@contextlib.contextmanager
def machines(rank: int):
    """A buffer that is made here has two machines, and between them no network that would tell of failures."""
    open_segment, statuses = _C.Segment.open, Backend.rank_statuses
    pids: list[int] = [0] * W
    dist.all_gather_object(pids, os.getpid())

    class Segment:
        shared, anonymous = _C.Segment.shared, _C.Segment.anonymous

        @staticmethod
        def open(address: tuple[int, int, int, int], size: int) -> object:
            is_near = pids.index(address[0]) in near(rank)
            return open_segment(address, size) if is_near else _C.Segment.anonymous(size)

    Backend.rank_statuses = lambda self: [status for status in statuses(self) if status.rank in near(rank)]
    with (
        mock.patch("socket.gethostname", lambda: f"machine {rank // 2}"),
        mock.patch("megatron_ep.buffer.distributed.agreed_topology", lambda infos, config: ep.Topology(2, 2)),
        mock.patch("megatron_ep.buffer.distributed.machines", lambda infos: ["one"] * W),
        mock.patch.object(_C, "Segment", Segment),
    ):
        yield


def run_rank(rank: int, port: int, limit: float, role: str, link: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=W)
    with machines(rank):
        buffer = ep.Buffer(None, ep.Config(num_experts=W, timeout=limit))
    link.send("ready")
    link.recv()
    name, _, seconds = role.partition(" ")
    try:
        time.sleep(float(seconds or 0))
        if name == "raise":
            with buffer._group.abort_peers_on_error():
                raise MemoryError("out of luck")
        while name == "ask":  # in no call
            buffer.raise_if_failed()
            time.sleep(0.05)
        ep.dispatch(torch.ones(4, 8), torch.arange(4).view(4, 1), torch.ones(4, 1), buffer=buffer)
    except (ep.EPError, MemoryError) as error:
        link.send((time.time(), f"{type(error).__name__} {error}".splitlines()[0]))
        os._exit(5)


class Rank(LinkedProcess):
    def stop(self) -> None:
        self.send_signal(signal.SIGSTOP)
        assert within(10, lambda: process_fate(self.pid) == "is stopped")


def start(roles: list[str], limit: float = 60.0) -> list[Rank]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # it outlives ranks, as torchrun's
    ranks = [Rank(run_rank, rank, store.port, limit, role) for rank, role in enumerate(roles)]
    assert [rank.hear() for rank in ranks] == ["ready"] * W
    ranks[0].store = store
    for rank in ranks:
        rank.link.send("go")
    return ranks


def ends(ranks: list[Rank], of: tuple[int, ...]) -> list[tuple[float, str]]:
    """When these ranks ended by the clock, and what they said."""
    try:
        return [ranks[rank].hear() for rank in of]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def check(ended: list[tuple[float, str]], began: float, cause: str, limit: float = 20) -> None:
    causes = {said.split(" ", 1)[1].removesuffix(f"; {HOW_TO_GO_ON}") for _, said in ended}
    assert len(causes) == 1, f"they name different causes: {ended}"
    assert all(cause in said for _, said in ended), ended
    assert max(when for when, _ in ended) - began < limit, ended


def test_a_rank_is_killed() -> None:
    """Its machine's other rank notices, and all of the other machine hear of it, in a call or not."""
    ranks = start(["sleep 60", "call", "call", "ask"])
    time.sleep(1.0)
    ranks[0].kill()
    killed = time.time()
    cause = "rank 1 stopped waiting: rank 0 has not entered notify 1 (it finished 0); the process of rank 0 has ended"
    check(ends(ranks, (1, 2, 3)), killed, f"EPAbortError {cause}")


@pytest.mark.parametrize("roles", [["raise 0", "call", "ask", "call"], ["raise 1", "sleep 60", "call", "ask"]])
def test_a_rank_fails(roles: list[str]) -> None:
    """It ends at once; or it does, and the other one of its machine is stopped, and tells nobody."""
    ranks, of = start(roles), (0, 1, 2, 3)
    if "sleep" in roles[1]:
        ranks[1].stop()
        of = (0, 2, 3)
    ended = ends(ranks, of)
    assert ended[0][1] == "MemoryError out of luck"
    check(ended[1:], ended[0][0], "EPAbortError rank 0 failed for a reason of its own: MemoryError: out of luck")


def test_a_rank_is_stopped() -> None:
    """Rank 1 times out first; those of the other machine came later to the call, and do not wait for their limits."""
    ranks = start(["sleep 60", "call", "call 4", "ask"], limit=5)
    ranks[0].stop()
    ended = ends(ranks, (1, 2, 3))
    assert [said.partition(" ")[0] for _, said in ended] == ["EPTimeoutError", "EPAbortError", "EPAbortError"]
    root = "rank 0 has not entered notify 1 (it finished 0); the process of rank 0 is stopped"
    check(ended, ended[0][0], f"rank 1 timed out first, after 5 s: {root}")


# ---- the broadcast alone


class Slow:
    """A store that answers nothing until it is let go."""

    def __init__(self):
        self.is_let_go = threading.Event()
        self.asked = 0

    def _wait(self, *_: object) -> None:
        self.asked += 1
        self.is_let_go.wait(60)
        raise dist.DistNetworkError("gone")

    check = get = compare_set = _wait


@pytest.fixture
def broadcasts():
    """Broadcasts of so many ranks over a store."""
    made: list[FailureBroadcast] = []

    def make(store: object, ranks: int = 2) -> list[FailureBroadcast]:
        made.extend(FailureBroadcast(store, ranks) for _ in range(ranks))
        return made[-ranks:]

    yield make
    for each in made:
        each.stop()


def test_the_first_failure_is_everybodys(broadcasts) -> None:
    ranks = broadcasts(dist.HashStore(), 3)
    other = dataclasses.replace(SAID, rank=1, cause="rank 1 failed")
    assert ranks[0].agree(SAID) == SAID and ranks[1].agree(other) == SAID and ranks[1].agree(other) == SAID
    assert within(20, lambda: ranks[2].first == SAID)
    for rank in ranks:
        rank.next_epoch()
    assert not any(rank.first or rank.has_own for rank in ranks)
    assert ranks[1].agree(other) == other and within(20, lambda: ranks[0].first == ranks[2].first == other)


def test_a_store_that_does_not_answer_holds_up_nobody(broadcasts) -> None:
    store = Slow()
    (rank,) = broadcasts(store, 1)
    assert within(20, lambda: store.asked == 1)
    started = time.monotonic()
    with mock.patch.object(failure_broadcast, "ANSWER_S", 0.5):
        assert rank.agree(SAID) == SAID
    assert 0.4 < time.monotonic() - started < 20
    with mock.patch.object(failure_broadcast, "ANSWER_S", 60):  # nobody waits for it a second time
        assert rank.agree(SAID) == SAID and rank.first is None
    rank.next_epoch()
    rank.stop()
    assert time.monotonic() - started < 20
    store.is_let_go.set()
    assert within(20, lambda: not rank._thread.is_alive()) and rank.first is None, "it is no failure"


@pytest.mark.parametrize("value", [b"{not JSON", b"[]", b"null", pickle.dumps(SAID), b'{"rank": 1}'])
def test_a_failure_that_no_rank_has_written_is_none(broadcasts, value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    store.set("first failure/0", value)
    heard, tells = broadcasts(store)
    assert within(20, lambda: len(caplog.records) == 2)
    assert "a report of a failure that no rank has written" in caplog.text
    started = time.monotonic()
    with mock.patch.object(failure_broadcast, "ANSWER_S", 60):  # nobody waits for a thread that has ended
        assert tells.agree(SAID) == SAID and heard.first is None
    assert time.monotonic() - started < 20


def test_a_failure_is_bounded_text(broadcasts) -> None:
    store = dist.HashStore()
    store.set("first failure/0", codec.encode(dataclasses.replace(SAID, cause="\x1b[2J" + "x" * 500_000)).decode())
    (rank,) = broadcasts(store, 1)
    assert within(20, lambda: rank.first is not None)
    assert rank.first.cause.startswith("?[2Jxxx") and len(rank.first.cause) < 5000


def test_with_many_ranks_each_looks_less_often() -> None:
    few, many = (FailureBroadcast(dist.HashStore(), ranks) for ranks in (8, 4096))
    assert few._interval == failure_broadcast.INTERVAL_S and many._interval == pytest.approx(1.0, abs=0.1)
    few.stop()
    many.stop()
