"""Ranks of other machines that stay away, are masked or die: the low-latency mode goes on with the rows and sums of one
machine with the same masks. The machines are this one, under several names."""

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
from modes import HOST, LowLatency, Normal, W
from run_on import run_on
from waits import within

import megatron_ep as ep
from megatron_ep.tools import local_ranks
from megatron_ep.tools.local_ranks import LocalRanks

MASK_S = 1.0
LAST = W - 1
on_machines = pytest.mark.parametrize("per_machine", [1, 2])


def masking(per_machine: int, mask_s: float = MASK_S) -> LowLatency:
    nodes = W // per_machine if per_machine < W else 2
    calls = LowLatency(HOST, nodes, 30.0, on_dead_rank="mask", mask_timeout=mask_s)
    assert (calls.buffer.fabric == "tcp") == (per_machine < W)
    return calls


def apart(*pairs: tuple[int, int]) -> torch.Tensor:
    """What is active of every rank where these leave each other out."""
    active = torch.ones(W, W, dtype=torch.int32)
    for a, b in pairs:
        active[a, b] = active[b, a] = 0
    return active


def without(*ranks: int) -> torch.Tensor:
    """Nobody but themselves takes these for active."""
    return apart(*((rank, other) for rank in ranks for other in range(W) if other != rank))


@pytest.mark.parametrize("per_machine", [1, 2, W])
@run_on("ranks")
def test_masks_that_callers_ask_for(per_machine):
    """The last rank of the first machine and the first of the last one leave each other out, of which the lower one
    asks for it; later all leave out the last rank; after a reset none is left out. What is said of two ranks concerns
    these two alone."""
    with machines_of(per_machine):
        calls = masking(per_machine, mask_s=20.0)
        pair = (per_machine - 1, W - per_machine)
        for active in (apart(), apart(pair), apart(pair) * without(LAST)):
            if calls.rank != max(pair):
                calls.mode.active_ranks.copy_(active[calls.rank])
            dist.barrier()
            calls.round_trips(active)
            assert calls.mode.active_ranks.tolist() == active[calls.rank].tolist()
        calls.is_usable_again()


def end(folder: Path) -> None:
    """Kills this process, the last rank's."""
    (folder / str(LAST)).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def dispatch_in_vain(calls: Normal | LowLatency, folder: Path) -> None:
    """Writes when normal calls began and ended, and what this rank heard. Waits for the others, which would hear of the
    end of its process, too."""
    began = time.time()
    with pytest.raises(ep.EPError) as caught:
        for _ in range(100_000):
            ep.dispatch(*calls.own(), buffer=calls.buffer)
    part = folder / f"{calls.rank}.part"
    part.write_text(f"{began} {time.time()} {caught.value}")
    part.rename(folder / str(calls.rank))
    within(10, lambda: all((folder / str(other)).exists() for other in range(W)))


def check_killed(monkeypatch, started, folder: Path, *settings: object, or_says: str = "") -> None:
    """Runs a function that kills the last rank on new processes: every other rank's last call ends at once. or_says:
    what may be said instead of that the connection broke."""
    monkeypatch.setattr(local_ranks, "DEATH_NOTICE_S", 10)  # the others are not ended before they have said it
    with pytest.raises(BrokenProcessPool), LocalRanks(W, 60) as ranks:
        ranks.run(started, folder, *settings)
    killed = float((folder / str(LAST)).read_text())
    for rank in range(LAST):
        began, at, says = (folder / str(rank)).read_text().split(" ", 2)
        assert float(at) - max(killed, float(began)) < 8, (rank, at, killed)
        assert re.match(f"the connection to rank {LAST} broke" + (or_says and f"|{or_says}"), says), (rank, says)


def run_killed(folder: Path, per_machine: int, masks: bool) -> None:
    """The last rank's process ends: the others of every machine say whose it was. With masks they leave it out of the
    low-latency mode first."""
    with machines_of(per_machine):
        calls = masking(per_machine) if masks else Normal(HOST, W // per_machine, 30.0)
        calls.round_trips()
        dist.barrier()
        if calls.rank == LAST:
            end(folder)
        if masks and per_machine > 1:  # one that is left out before anybody calls the normal mode
            calls.round_trips(without(LAST))
        dispatch_in_vain(calls, folder)


@pytest.mark.parametrize("masks", [False, True])
@on_machines
def test_a_killed_rank_of_another_machine(per_machine, masks, tmp_path, monkeypatch):
    seen = rf"rank \d+ stopped waiting: .*; the process of rank {LAST} has ended"  # by a rank of its machine
    check_killed(monkeypatch, run_killed, tmp_path, per_machine, masks, or_says="" if masks else seen)


def run_killed_in_both_modes(folder: Path) -> None:
    """The last rank's process ends while rank 0 is in the normal mode, whose call ends. The others are in the
    low-latency mode, whose calls go on without both; then they come to the normal mode, too."""
    with machines_of(2):
        calls = masking(2)
        calls.round_trips()
        dist.barrier()
        if calls.rank == LAST:
            time.sleep(MASK_S / 2)  # the others wait for it
            end(folder)
        if calls.rank:
            calls.round_trips(without(0, LAST))
        dispatch_in_vain(calls, folder)


def test_a_rank_killed_while_others_are_in_both_modes(tmp_path, monkeypatch):
    check_killed(monkeypatch, run_killed_in_both_modes, tmp_path)
