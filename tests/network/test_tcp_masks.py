"""Ranks of other machines that stay away, are masked or die: the low-latency mode's rows and sums as one machine has
them with the same masks, by the specification. The machines are this one, under several names."""

import os
import re
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forced_machines import machines_of
from nightly import at_night
from waits import within

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.tools import local_ranks
from megatron_ep.tools.local_ranks import LocalRanks

TOPOLOGIES = [(2, 1), (2, 2), (3, 2)]  # machines, and ranks of each
EXPERTS, TOKENS, HIDDEN, TOPK = 2, (8, 0, 3, 8, 5, 1), 64, 2  # experts of a rank
SIZES = dict(max_tokens=max(TOKENS), hidden=HIDDEN, topk=TOPK, dtype=torch.float32)
MASK_S = 1.0


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=str)
def ranks(request):
    machines, per_machine = request.param
    with LocalRanks(machines * per_machine, 120) as ranks:
        yield ranks, machines, per_machine


def inputs_of(world: int):
    generator = torch.Generator().manual_seed(world)
    tokens = TOKENS[:world]
    x = [torch.randn(t, HIDDEN, generator=generator) for t in tokens]
    ids = [torch.rand(t, EXPERTS * world, generator=generator).topk(TOPK).indices for t in tokens]
    weights = [torch.rand(t, TOPK, generator=generator) for t in tokens]
    return x, ids, weights


def trip(mode, x, ids, weights):
    received = mode.dispatch(x, ids)
    return received, mode.combine(received.x, received.handle, weights)


def check_trip(mode, active: torch.Tensor) -> None:
    """A dispatch and its combine, with these active ranks of every rank: the rows by the specification, the sums as
    ranks of one process have them for whom nobody chose the masked ranks."""
    rank, world = mode.buffer.rank, len(active)
    x, ids, weights = inputs_of(world)
    kept = reference.without_masked(ids, active, EXPERTS * world)
    expected, _, counts = reference.dispatch(x, kept, weights, EXPERTS * world)
    received, y = trip(mode, x[rank], ids[rank], weights[rank])
    rows = torch.cat([part[:count] for part, count in zip(received.x, counts[rank], strict=True)])
    assert torch.equal(received.recv_counts, counts[rank].int()) and torch.equal(rows, expected[rank])
    with ep.LocalCluster(world, 1, ep.Config(num_experts=EXPERTS * world)) as cluster:
        assert torch.equal(y, trip(ep.LowLatency(cluster, **SIZES), x, kept, weights)[1][rank])


def without(world: int, *ranks: int) -> torch.Tensor:
    """Nobody but themselves takes these for active."""
    active = torch.ones(world, world, dtype=torch.int32)
    for rank in ranks:
        active[rank] = active[:, rank] = 0
        active[rank, rank] = 1
    return active


def make(machines: int, per_machine: int, mask_s: float = MASK_S):
    """A buffer over the network, and its low-latency mode, which masks."""
    config = ep.Config(num_experts=EXPERTS * machines * per_machine, timeout=30)
    buffer = ep.Buffer(None, config, ep.Topology(machines, per_machine))
    assert buffer.fabric == "tcp"
    return buffer, ep.LowLatency(buffer, **SIZES, on_dead_rank="mask", mask_timeout=mask_s)


def run_masked_by_callers(machines: int, per_machine: int) -> None:
    """The last rank of the first machine and the first of the last one leave each other out; later all leave out the
    last rank; after a reset none is left out."""
    world = machines * per_machine
    with machines_of(per_machine):
        buffer, mode = make(machines, per_machine, mask_s=20.0)
        with buffer:
            a, b = per_machine - 1, world - per_machine
            for active in (
                without(world),
                pair_apart(world, a, b),
                pair_apart(world, a, b) * without(world, world - 1),
            ):
                mode.active_ranks.copy_(active[buffer.rank])
                dist.barrier()
                for _ in range(3):
                    check_trip(mode, active)
                assert mode.active_ranks.tolist() == active[buffer.rank].tolist()
            buffer.reset()
            check_trip(mode, without(world))


def pair_apart(world: int, a: int, b: int) -> torch.Tensor:
    active = without(world)
    active[a, b] = active[b, a] = 0
    return active


def test_masks_that_callers_ask_for(ranks):
    started, *topology = ranks
    started.run(run_masked_by_callers, *topology)


def write_and_wait(folder: Path, rank: int, world: int, text: str) -> None:
    """Writes what a rank has to say and waits for the others, which would hear of the end of its process, too."""
    part = folder / f"{rank}.part"
    part.write_text(text)
    part.rename(folder / str(rank))
    within(10, lambda: all((folder / str(other)).exists() for other in range(world)))


def run_killed(machines: int, per_machine: int, folder: str, masks: bool) -> None:
    """The last rank's process ends: the others of every machine say whose it was. With masks they leave it out of the
    low-latency mode first."""
    world = machines * per_machine
    x, ids, _ = inputs_of(world)
    with machines_of(per_machine):
        config = ep.Config(num_experts=EXPERTS * world, timeout=30)
        buffer = ep.Buffer(None, config, ep.Topology(machines, per_machine))
        rank = buffer.rank
        mode = ep.LowLatency(buffer, **SIZES, on_dead_rank="mask", mask_timeout=MASK_S) if masks else None
        if mode is not None:
            check_trip(mode, without(world))

        ep.dispatch(x[rank], ids[rank], buffer=buffer)
        dist.barrier()
        if rank == world - 1:
            (Path(folder) / str(rank)).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if mode is not None and per_machine > 1:  # one that is left out before anybody calls the normal mode
            for _ in range(3):
                check_trip(mode, without(world, world - 1))
        began = time.time()
        with pytest.raises(ep.EPError) as caught:
            for _ in range(100_000):
                ep.dispatch(x[rank], ids[rank], buffer=buffer)
        write_and_wait(Path(folder), rank, world, f"{began} {time.time()} {caught.value}")


def check_killed(started, machines: int, per_machine: int, folder: Path, *settings, or_says: str = "") -> None:
    """Runs a function like `run_killed`, on new processes: every other rank's last call ends at once. or_says: what may
    be said instead of that the connection broke."""
    last = machines * per_machine - 1
    with pytest.raises(BrokenProcessPool), LocalRanks(last + 1, 60) as ranks:
        ranks.run(started, machines, per_machine, str(folder), *settings)
    killed = float((folder / str(last)).read_text())
    for rank in range(last):
        began, at, says = (folder / str(rank)).read_text().split(" ", 2)
        assert float(at) - max(killed, float(began)) < 8, (rank, at, killed)
        expected = f"the connection to rank {last} broke" + (or_says and f"|{or_says.format(last)}")
        assert re.match(expected, says), (rank, says)


@pytest.fixture
def noticed_late(monkeypatch):
    monkeypatch.setattr(local_ranks, "DEATH_NOTICE_S", 10)  # the others are not ended before they have said it


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("machines", "per_machine"), [*TOPOLOGIES[:2], at_night(*TOPOLOGIES[2])])
def test_a_killed_rank_of_another_machine(machines, per_machine, masks, tmp_path, noticed_late):
    seen = r"rank \d+ stopped waiting: .*; the process of rank {} has ended"  # by a rank of its machine; not with masks
    check_killed(run_killed, machines, per_machine, tmp_path, masks, or_says="" if masks else seen)


def run_killed_in_both_modes(machines: int, per_machine: int, folder: str) -> None:
    """The last rank's process ends while rank 0 is in the normal mode, whose call ends. The others are in the
    low-latency mode, whose calls go on without both; then they come to the normal mode, too."""
    world = machines * per_machine
    x, ids, _ = inputs_of(world)
    with machines_of(per_machine):
        buffer, mode = make(machines, per_machine)
        rank = buffer.rank
        check_trip(mode, without(world))
        dist.barrier()
        if rank == world - 1:
            time.sleep(MASK_S / 2)  # the others wait for it
            (Path(folder) / str(rank)).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3 if rank else 0):
            check_trip(mode, without(world, 0, world - 1))
        began = time.time()
        with pytest.raises(ep.EPError) as caught:
            ep.dispatch(x[rank], ids[rank], buffer=buffer)
        write_and_wait(Path(folder), rank, world, f"{began} {time.time()} {caught.value}")


def test_a_rank_killed_while_others_are_in_both_modes(tmp_path, noticed_late):
    check_killed(run_killed_in_both_modes, 2, 2, tmp_path)
