"""Ranks as processes: they run together, what goes wrong is told in time, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_ep
from megatron_ep.tools.local_ranks import LocalRanks


@pytest.fixture
def ranks():
    with LocalRanks(2, timeout=30.0) as ranks:
        yield ranks


def _sum_of_ranks(offset):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item() + offset, torch.get_num_threads()


def _rank_1_fails():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like this")
    dist.barrier()


def _rank_1_sleeps():
    if dist.get_rank() == 1:
        time.sleep(1000)


def _rank_1_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pids):
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.02)


def test_results_come_in_rank_order(ranks):
    assert ranks.run(_sum_of_ranks, 10) == [(0, 11.0, 1), (1, 11.0, 1)]


def test_a_failure_is_raised_here_at_once_and_the_next_run_starts_anew(ranks):
    pids = ranks.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 does not like this"):
        ranks.run(_rank_1_fails)
    assert time.monotonic() - start < 10, "the rank in the barrier is not waited for"
    _wait_until_gone(pids)
    assert ranks.run(_sum_of_ranks, 0)[0][1] == 1.0


def test_a_rank_that_never_returns_is_named(ranks):
    pids = ranks.run(os.getpid)
    ranks.run(_sum_of_ranks, 0)  # imports this file
    ranks.timeout = 2.0
    with pytest.raises(TimeoutError, match=r"ranks \[1\] were not done after 2.0 s"):
        ranks.run(_rank_1_sleeps)
    _wait_until_gone(pids)


def test_a_killed_rank_is_an_error(ranks):
    pids = ranks.run(os.getpid)
    with pytest.raises(BrokenProcessPool):
        ranks.run(_rank_1_dies)
    _wait_until_gone(pids)


def test_closing_ends_the_processes(ranks):
    pids = ranks.run(os.getpid)
    ranks.close()
    _wait_until_gone(pids)


SCRIPT = """
from megatron_ep.tools.local_ranks import LocalRanks

def home():
    import megatron_ep.config
    return megatron_ep.config.__file__

if __name__ == "__main__":
    with LocalRanks(1) as ranks:
        print(ranks.run(home)[0], home())
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks into the working directory first")
@pytest.mark.nightly
def test_ranks_import_what_their_parent_imports(tmp_path):
    """Not what lies in the working directory."""
    decoy = tmp_path / "decoy"
    (decoy / "megatron_ep").mkdir(parents=True)
    (decoy / "megatron_ep" / "__init__.py").touch()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(megatron_ep.__file__).parents[1])}
    command = [sys.executable, str(script)]
    run = subprocess.run(command, cwd=decoy, env=environment, capture_output=True, text=True, timeout=60)
    in_rank, in_parent = run.stdout.split()
    assert in_rank == in_parent == str(Path(megatron_ep.__file__).parent / "config.py")
