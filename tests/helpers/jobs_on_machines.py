"""Jobs on two machines made of namespaces (tests/network/machines.py), a log of each machine."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rank_processes
from rank_processes import Program

ROOT = Path(__file__).resolve().parents[2]

# The head of a program whose first argument is the buffer's timeout in seconds: check(buffer) makes a call, which must
# have the bits of one machine.
COMPARED_CALLS = """
import os, sys, time, torch, torch.distributed as dist, megatron_ep as ep
from pathlib import Path
dist.init_process_group("gloo")
rank, world, per_node = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
config = ep.Config(num_experts=2 * world, timeout=float(sys.argv[1]))
generator = torch.Generator().manual_seed(0)
x = [torch.randn(40, 1024, generator=generator) for _ in range(world)]
ids = [torch.rand(40, 2 * world, generator=generator).topk(3).indices for _ in range(world)]

def call(buffer, x, ids):
    rows = ep.dispatch(x, ids, buffer=buffer)
    out = [r.tanh() for r in rows.x] if isinstance(x, list) else rows.x.tanh()
    return ep.combine(out, rows.handle)

with ep.LocalCluster(world // per_node, per_node, config) as cluster:
    expected = call(cluster, x, ids)[rank]

def check(buffer):
    assert torch.equal(call(buffer, x[rank], ids[rank]), expected)
"""

# Each rank dispatches until that fails. Arguments: the buffer's timeout in seconds, its device.
FOR_EVER = """
import os, sys, time, torch, torch.distributed as dist, megatron_ep as ep
timeout, device = float(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
buffer = ep.Buffer(None, ep.Config(num_experts=8, timeout=timeout), device=device)
assert (buffer.fabric, buffer.topology) == ("tcp", ep.Topology(2, dist.get_world_size() // 2))
x, ids = torch.ones(64, 256, device=device), torch.rand(64, 8, device=device).topk(2).indices
for call in range(10**9):
    try:
        ep.dispatch(x, ids, buffer=buffer)
        buffer.synchronize()
    except ep.EPError as error:
        os.write(1, f"RANK {rank} AT {time.time()}: {str(error).splitlines()[0]}\\n".encode())  # whole: ranks share it
        os._exit(3)
    if call == 20:
        print(f"RANK {rank} RUNS AS {os.getpid()}", flush=True)
"""


def torchrun(made: Any, *arguments: str, ranks: int) -> list[str]:
    """The command, on each machine, of a job with so many ranks a machine."""
    script = (
        f'exec "$0" -m torch.distributed.run --nnodes {made.count} --node-rank $MACHINE --nproc-per-node {ranks} '
        f'--master-addr {made.address(0)} --master-port 29500 "$@"'
    )
    return ["sh", "-c", script, sys.executable, *arguments]


def log_of(folder: Path, machine: int) -> Path:
    return folder / f"{machine}.log"


def start(made: Any, folder: Path, command: list[str], **variables: str) -> list[subprocess.Popen[str]]:
    processes = []
    for machine in range(made.count):
        with log_of(folder, machine).open("w") as log:
            environment = {"OMP_NUM_THREADS": "1", "MEGATRON_EP_FABRIC": "tcp", **variables}
            processes.append(made.start(machine, command, environment, stdout=log, stderr=log, cwd=ROOT))
    return processes


def wait_for(folder: Path, pattern: str, count: int, limit: float) -> list[re.Match[str]]:
    """Until a pattern has been found so many times in all logs."""
    deadline = time.monotonic() + limit
    while True:
        found = [match for log in sorted(folder.glob("*.log")) for match in re.finditer(pattern, log.read_text())]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, [log.read_text() for log in folder.glob("*.log")]
        time.sleep(0.05)


def fork(made: Any, folder: Path, arguments: list[object], ranks: int) -> list[Program]:
    """So many ranks a machine, without a launcher."""
    places = {"MASTER_ADDR": made.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    job = rank_processes.job(made.count * ranks, ranks, **places, MEGATRON_EP_FABRIC="tcp")
    return [
        made.fork(machine, arguments, job[machine * ranks :][:ranks], log=log_of(folder, machine), cwd=ROOT)
        for machine in range(made.count)
    ]


def run_for_ever(made: Any, folder: Path, ranks: int, timeout: float, device: str, limit: float) -> None:
    """Starts FOR_EVER, and waits until all its ranks run."""
    program = folder / "program.py"
    program.write_text(FOR_EVER)
    fork(made, folder, [program, timeout, device], ranks)
    wait_for(folder, r"RANK (\d) RUNS AS (\d+)", 2 * ranks, limit)
