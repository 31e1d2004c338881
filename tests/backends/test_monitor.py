"""The thread that looks after a buffer: it ends with the buffer, and keeps no process from ending."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep.bench.local_ranks import LocalRanks

W = 3


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 60) as ranks:
        yield ranks


def monitors() -> int:
    return sum("monitor" in thread.name for thread in threading.enumerate())


def run_lives() -> None:
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
    assert memory() is None and monitors() == 0, "nobody has it any more"
    for rank in range(W):
        alone = dist.new_group([rank])
        if rank == dist.get_rank():
            with ep.Buffer(alone, config):
                assert monitors() == 0, "there is nobody to look after"


def test_it_lives_as_long_as_its_buffer(ranks) -> None:
    ranks.run(run_lives)


OPEN_AT_THE_END = """
import sys, torch, torch.distributed as dist
import megatron_ep as ep
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=3)
buffer = ep.Buffer(None, ep.Config(num_experts=3, timeout=30))
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
        for rank in range(W)
    ]
    said = []
    for rank in ranks:
        said.append(rank.stdout.readline())
    printed = time.monotonic()
    assert said == ["12\n", "0\n", "0\n"]
    errors = [rank.communicate(timeout=30)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * W and not any("Traceback" in error for error in errors), errors
    assert time.monotonic() - printed < 15
