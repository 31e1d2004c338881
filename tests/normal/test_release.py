"""Buffer.release: the ranks give a buffer's memory back together, at once, and never wait without a bound."""

import contextlib
import os
import signal
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import drawn
from rank_processes import LinkedProcess
from run_on import run_on
from waits import within

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.buffer import distributed, release
from megatron_ep.buffer.host import HostBackend
from megatron_ep.buffer.rank_group import RankGroup

W, E, K, H, T = 3, 6, 2, 16, 8
PATIENCE_S = 1.0
REASON = "2 CUDA graphs may replay its launches"


def make(timeout=10.0):
    buffer = ep.Buffer(None, ep.Config(num_experts=E, timeout=timeout, tuning=ep.Tuning(nvl_ring_bytes=1 << 20)))
    return buffer, ep.LowLatency(buffer, max_tokens=T, hidden=H, topk=K, dtype=torch.float32)


def inputs():
    return drawn([T] * W, E, K, H, is_whole=True)[:2]


def use(buffer, low_latency):
    x, ids = inputs()
    weights = [torch.ones(T, K)] * W
    rows = ep.dispatch(x[buffer.rank], ids[buffer.rank], weights[0], buffer=buffer)
    assert torch.equal(rows.x, reference.dispatch(x, ids, weights, E)[0][buffer.rank])
    assert torch.equal(ep.combine(rows.x, rows.handle), K * x[buffer.rank])
    received = low_latency.dispatch(x[buffer.rank], ids[buffer.rank])
    assert torch.equal(low_latency.combine(received.x, received.handle), K * x[buffer.rank])


def mapped() -> int:
    """Mappings of buffers' memory in this process, and open files of it."""
    own = Path("/proc/self")
    files = [os.readlink(path) for path in (own / "fd").iterdir() if path.is_symlink()]
    return sum("/megatron_ep-" in line for line in (*(own / "maps").read_text().splitlines(), *files))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@run_on("ranks")
def test_twenty_buffers_leave_nothing() -> None:
    kept = []  # to keep a buffer, or what was made on it, keeps no memory
    sizes = []
    for _ in range(20):
        buffer, low_latency = make()
        use(buffer, low_latency)
        backend = weakref.ref(buffer._group.live_backend())
        dropped = ep.LowLatency(buffer, max_tokens=2 * T, hidden=H, topk=K)
        assert mapped() > W
        del dropped
        buffer.release()
        kept.append((buffer, low_latency))
        assert within(10, lambda left=backend: left() is None), "it has the launches, and what these need on a GPU"
        assert mapped() == 0
        sizes.append(resident())
    assert sizes[-1] - sizes[4] < 1 << 20


@run_on("ranks")
def test_a_released_buffer_is_closed() -> None:
    buffer, low_latency = make()
    x, ids = (part[buffer.rank] for part in inputs())
    _, hook = low_latency.dispatch(x, ids, return_recv_hook=True)
    buffer.release()
    assert not buffer.is_open
    for call in (
        hook,
        buffer.release,
        lambda: ep.dispatch(x, ids, buffer=buffer),
        lambda: low_latency.dispatch(x, ids),
        buffer.statistics,
        buffer.reset,
    ):
        with pytest.raises(ValueError, match="buffer is closed"):
            call()
    buffer.close()
    buffer.abort("nobody hears it")


@run_on("ranks")
def test_a_rank_that_needs_the_memory_refuses_for_all() -> None:
    buffer, low_latency = make()
    need = REASON if buffer.rank == 1 else ""
    with (
        mock.patch.object(HostBackend, "needs_memory", lambda _: need),
        pytest.raises(ValueError, match=f"^rank 1 cannot release the buffer: {REASON}$"),
    ):
        buffer.release()
    use(buffer, low_latency)
    buffer.release()
    assert mapped() == 0


@run_on("ranks")
def test_a_failure_that_nobody_saw_is_raised_once_all_is_given_back() -> None:
    """As on a GPU, whose launches fail when nobody looks."""
    buffer, _ = make()
    failure = ep.EPAbortError("enough") if buffer.rank == 0 else None
    seen = pytest.raises(ep.EPAbortError, match="enough") if failure else contextlib.nullcontext()
    with mock.patch.object(RankGroup, "_unseen_failure", lambda _: failure), seen:
        buffer.release()
    assert mapped() == 0
    use(*make())


@run_on("ranks")
def test_a_rank_that_does_not_come_is_named_on_all() -> None:
    """Rank 2 lives, and comes when the others have given up."""
    with (
        mock.patch.object(distributed, "RENDEZVOUS_S", PATIENCE_S),
        mock.patch.object(release, "DECISION_S", PATIENCE_S),
    ):
        buffer, low_latency = make(timeout=PATIENCE_S)
        use(buffer, low_latency)
        dist.barrier()
        if buffer.rank == 2:
            dist.barrier()  # the others have given up
        started = time.monotonic()
        says = "^rank 2 did not come to step 7 of the buffer's release within 1 s$"
        with pytest.raises(ep.EPError, match=says):
            buffer.release()
        assert time.monotonic() - started < 6 * PATIENCE_S
        assert not buffer.is_open
    if buffer.rank != 2:
        dist.barrier()
    del low_latency
    again = make()
    use(*again)
    again[0].release()


class Memory:
    """Instead of memory that CUDA maps; says when it was given back."""

    def __init__(self, delay: float):
        self.delay = delay
        self.released = 0.0

    def release(self) -> None:
        time.sleep(self.delay)
        self.released = time.monotonic()  # the machine's clock


def run_in_order(maps_others: bool) -> tuple[float, float, bool]:
    """Rank 1 takes its time to unmap. Returns when this rank had unmapped all, and when its own memory was freed."""
    buffer, _ = make()
    rank, left = buffer.rank, []
    memories = [[Memory(0.3 if rank == 1 else 0.0) for _ in range(W)] for _ in range(2)]
    with mock.patch.object(release.peer_memory, "maps_others", lambda: maps_others and rank == 0):
        release.of_machine(
            buffer._group._rendezvous,
            memories,
            buffer._group._has_ended,
            lambda: left.append(time.monotonic()),
            all_came=True,
        )
    others = [memory.released for of_ranks in memories for i, memory in enumerate(of_ranks) if i != rank]
    assert all(others)
    return max(others), min(of_ranks[rank].released for of_ranks in memories), bool(left)


@pytest.mark.parametrize("maps_others", [False, True])
def test_memory_is_freed_once_nobody_maps_it(ranks, maps_others) -> None:
    unmapped, freed, left = zip(*ranks.run(run_in_order, maps_others), strict=True)
    assert max(unmapped) < min(freed)
    assert set(left) == {not maps_others}


def run_rank(rank: int, folder: Path, dies: str, link: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=W)

    def die(*_, **__) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(distributed, "RENDEZVOUS_S", 20.0):
        buffer, low_latency = make(timeout=20.0)
        use(buffer, low_latency)
        link.send("ready")
        link.recv()
        if rank == 2 and dies == "before":
            die()
        if rank == 2:
            release.of_machine = die
        started, outcome = time.monotonic(), "released"
        try:
            buffer.release()
        except ep.EPError as error:
            outcome = str(error)
        link.send((mapped(), outcome, time.monotonic() - started))


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_a_rank_that_dies(tmp_path, dies) -> None:
    """Before it, the others are told; while memory is given back, nobody needs it any more. All ends soon: a rank
    whose death nobody noticed would be waited for for 20 s."""
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(LinkedProcess(run_rank, rank, tmp_path, dies)) for rank in range(W)]
        assert [rank.hear() for rank in ranks] == ["ready"] * W
        for rank in ranks:
            rank.link.send("go")
        said = [rank.hear() for rank in ranks[:2]]
        assert ranks[2].wait(60) == -signal.SIGKILL
    absent = "rank 2 does not come to step 7 of the buffer's release: the process has ended"
    for left, outcome, seconds in said:
        assert (left, outcome) == (0, absent if dies == "before" else "released") and seconds < 15
