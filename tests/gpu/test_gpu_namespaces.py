"""GPU ranks on two machines made of namespaces, which share nothing but GPUs and a network: the host's bits, and a
machine that is gone. As root; a GPU for each machine, or one for both."""

import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "network"))
import machines  # noqa: E402

pytestmark = pytest.mark.skipif(bool(machines.why_not()), reason=str(machines.why_not()))

HEAD = f"""
import os, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "gpu")!r}, {str(ROOT / "tests" / "helpers")!r}]
import torch, torch.distributed as dist, megatron_ep as ep
import test_gpu_over_host as over_host
dist.init_process_group("gloo")
"""

SAME_BITS = """
over_host.run_host_bits(2)
for name in over_host.SIZES:
    over_host.run_cases(2, name)
over_host.run_low_latency(2)
dist.barrier()
print("ALL THE SAME", flush=True)
"""

FOR_EVER = """
over_host.choose()
rank = dist.get_rank()
buffer = ep.Buffer(None, ep.Config(num_experts=8, timeout=30), device="cuda")
assert (buffer.fabric, buffer.topology) == ("tcp", ep.Topology(2, 1))
x, ids = torch.ones(64, 256, device="cuda"), torch.rand(64, 8, device="cuda").topk(2).indices
for call in range(10**9):
    try:
        ep.dispatch(x, ids, buffer=buffer)
        buffer.synchronize()
    except ep.EPError as error:
        print(f"RANK {rank} AT {time.time()}: {str(error).splitlines()[0]}", flush=True)
        os._exit(3)
    if call == 20:
        print(f"RANK {rank} RUNS", flush=True)
"""


def start(made, folder: Path, program: str):
    script = folder / "program.py"
    script.write_text(HEAD + program)
    command = (
        'exec "$0" -m torch.distributed.run --nnodes 2 --node-rank $MACHINE --nproc-per-node 1 '
        f'--master-addr {made.address(0)} --master-port 29500 "$1"'
    )
    processes = []
    for machine in range(2):
        with (folder / f"{machine}.log").open("w") as log:
            processes.append(
                made.start(machine, ["sh", "-c", command, sys.executable, str(script)], stdout=log, stderr=log)
            )
    return processes


def log_of(folder: Path, machine: int) -> str:
    return (folder / f"{machine}.log").read_text()


def test_the_host_s_bits(tmp_path):
    with machines.Machines(2) as two:
        statuses = [process.wait(300) for process in start(two, tmp_path, SAME_BITS)]
    for machine in range(2):
        assert "ALL THE SAME" in log_of(tmp_path, machine), (statuses, log_of(tmp_path, machine))


def test_a_machine_that_is_gone_is_heard_of_on_the_other(tmp_path):
    def wait_for(pattern: str, machine: int, limit: float) -> re.Match[str]:
        deadline = time.monotonic() + limit
        while not (found := re.search(pattern, log_of(tmp_path, machine))):
            assert time.monotonic() < deadline, log_of(tmp_path, machine)
            time.sleep(0.05)
        return found

    with machines.Machines(2) as two:
        start(two, tmp_path, FOR_EVER)
        for machine in range(2):
            wait_for(rf"RANK {machine} RUNS", machine, 90)
        killed = time.time()
        two.stop(1)
        heard = wait_for(r"RANK 0 AT ([\d.]+): (.*)", 0, 20)
    assert float(heard[1]) - killed < 2, heard[0]
    assert re.search(r"connection to rank 1 broke|rank 1", heard[2]), heard[2]
