"""Training and failures on machines made of namespaces: host names, addresses, processes and shared memory apart."""

import re
import sys
import time
from pathlib import Path

import machines
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(bool(machines.why_not()), reason=str(machines.why_not()))

# Each rank dispatches for ever; machine 1's last rank ends in the way that it is told.
PROGRAM = """
import os, sys, time, torch, torch.distributed as dist, megatron_ep as ep
dist.init_process_group("gloo")
rank = dist.get_rank()
buffer = ep.Buffer(None, ep.Config(num_experts=8, timeout=float(sys.argv[1])))
assert (buffer.fabric, buffer.topology) == ("tcp", ep.Topology(2, 2))
x, ids = torch.ones(64, 256), torch.rand(64, 8).topk(2).indices
for call in range(10**9):
    try:
        ep.dispatch(x, ids, buffer=buffer)
    except ep.EPError as error:
        print(f"RANK {rank} AT {time.time()}: {str(error).splitlines()[0]}", flush=True)
        time.sleep(12)  # torchrun ends the others of a machine when one has ended
        os._exit(3)
    if call == 20:
        print(f"RANK {rank} RUNS AS {os.getpid()}", flush=True)
"""


def torchrun(*arguments: str) -> list[str]:
    script = (
        'exec "$0" -m torch.distributed.run --nnodes 2 --node-rank $MACHINE --nproc-per-node 2 '
        f'--master-addr {machines.Machines.address(0)} --master-port 29500 "$@"'
    )
    return ["sh", "-c", script, sys.executable, *arguments]


@pytest.fixture
def two():
    with machines.Machines(2) as made:
        yield made


def log_of(folder: Path, machine: int) -> Path:
    return folder / f"{machine}.log"


def start(made, folder: Path, command):
    for machine in range(made.count):
        with log_of(folder, machine).open("w") as log:
            environment = {"OMP_NUM_THREADS": "1", "MEGATRON_EP_FABRIC": "tcp"}
            yield made.start(machine, command, environment, stdout=log, stderr=log, cwd=ROOT)


def texts(made, folder: Path, command, limit: float = 120) -> list[str]:
    statuses = [process.wait(limit) for process in list(start(made, folder, command))]
    found = [log_of(folder, machine).read_text() for machine in range(made.count)]
    assert statuses == [0] * made.count, found
    return found


def test_the_example_on_two_machines(two, tmp_path):
    command = torchrun("examples/torchrun.py", "--nodes", "2")
    for machine, text in enumerate(texts(two, tmp_path, command)):
        assert text.count("every sum is right") == 2, f"machine {machine}: {text}"  # torchrun's own end may be noisy


def losses(folder: Path) -> list[str]:
    return (folder / "loss.csv").read_text().splitlines()


def test_training_on_two_machines_has_the_losses_of_one(two, tmp_path):
    train = ("-m", "megatron_ep.cli.main", "train", "tiny_moe_cpu", "--steps", "3", "--out")
    texts(two, tmp_path, torchrun(*train, str(tmp_path / "two")), 300)
    with machines.Machines(1) as one:
        command = [sys.executable, *train, str(tmp_path / "one")]
        texts(one, tmp_path, command, 300)
    column = losses(tmp_path / "one")[0].split(",").index("loss")
    both = [[line.split(",")[column] for line in losses(tmp_path / name)] for name in ("one", "two")]
    assert both[0] == both[1] and len(both[0]) == 4


def wait_for(folder: Path, pattern: str, count: int, limit: float) -> list[re.Match[str]]:
    deadline = time.monotonic() + limit
    while True:
        found = [match for log in sorted(folder.glob("*.log")) for match in re.finditer(pattern, log.read_text())]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, [log.read_text() for log in folder.glob("*.log")]
        time.sleep(0.05)


def run_program(made, tmp_path: Path, timeout: float) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    list(start(made, tmp_path, torchrun(str(program), str(timeout))))
    wait_for(tmp_path, r"RANK (\d) RUNS AS (\d+)", 4, 60)


def test_a_machine_that_is_gone_is_heard_of_on_the_other(two, tmp_path):
    run_program(two, tmp_path, 30)
    killed = time.time()
    two.stop(1)
    for match in wait_for(tmp_path, r"RANK ([01]) AT ([\d.]+): (.*)", 2, 20):
        assert float(match[2]) - killed < 2, match[0]
        assert re.search(r"connection to rank [23] broke|rank [23]", match[3])


def test_a_network_that_is_cut_ends_in_the_bound(two, tmp_path):
    run_program(two, tmp_path, 4)
    cut = time.time()
    two.link(1, "down")
    for match in wait_for(tmp_path, r"RANK (\d) AT ([\d.]+): (.*)", 4, 30):
        assert 3 < float(match[2]) - cut < 12, match[0]


def test_a_network_that_comes_back_in_time_is_no_failure(two, tmp_path):
    run_program(two, tmp_path, 20)
    two.link(1, "down")
    time.sleep(1)
    two.link(1, "up")
    time.sleep(5)
    assert not [log for log in tmp_path.glob("*.log") if " AT " in log.read_text()]
