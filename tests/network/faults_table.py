"""What becomes of a job between two machines, two ranks each, when something goes wrong: prints a table of who was told
what, how long after it (as root; machines are namespaces, see machines.py; minutes):

    python tests/network/faults_table.py [NAME ...]
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from jobs_on_machines import COMPARED_CALLS, log_of, start, torchrun, wait_for
from machines import Machines, why_no_filter, why_not

# Calls for ever, compared with those of one machine. With a second argument the buffer is made once a file of that name
# is there. With a third that rank has a forked child. With a fourth machine 0 says that it has this address.
PROGRAM = (
    COMPARED_CALLS
    + """
go, parent, address = sys.argv[2], int(sys.argv[3]), sys.argv[4]
if address and os.environ["MACHINE"] == "0":
    os.environ["MEGATRON_EP_ADDRESS"] = address
print(f"RANK {rank} IS READY", flush=True)
while go and not Path(go).exists():
    time.sleep(0.05)
try:
    buffer = ep.Buffer(None, config, ep.Topology(2, per_node))
    if rank == parent and os.fork() == 0:
        time.sleep(1e6)
    for calls in range(10**9):
        check(buffer)
        if calls % 20 == 0:
            print(f"RANK {rank} CALLS AT {time.time()}", flush=True)
except ep.EPError as error:
    print(f"RANK {rank} AT {time.time()}: {str(error).splitlines()[0]}", flush=True)
time.sleep(1e6)
"""
)


class Job:
    """Runs from construction until `close`."""

    def __init__(self, folder: Path, timeout: float, *, hostname: str | None, waits: str, parent: int):
        self.folder, self.made = folder, Machines(2, hostname)
        self.go = folder / "go"
        program = folder / "program.py"
        program.write_text(PROGRAM)
        wrong = "127.0.0.1" if waits == "address" else ""  # which the others call
        arguments = map(str, [program, timeout, self.go if waits else "", parent, wrong])
        start(self.made, folder, torchrun(self.made, *arguments, ranks=2))
        wait_for(folder, r"RANK \d IS READY", 4, 300)
        if not waits:
            self.wait_for_calls(range(4), time.time())

    def wait_for_calls(self, ranks: range, since: float, limit: float = 120) -> bool:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            text = "".join(log_of(self.folder, machine).read_text() for machine in range(2))
            found = re.findall(r"RANK (\d) CALLS AT ([\d.]+)", text)
            if {int(rank) for rank, at in found if float(at) > since} >= set(ranks):
                return True
            time.sleep(0.1)
        return False

    def send(self, rank: int, number: signal.Signals) -> None:
        for task in Path("/proc").glob("[0-9]*"):
            try:
                environment = (task / "environ").read_bytes().split(b"\0")
                is_rank = f"RANK={rank}".encode() in environment and b"MACHINE=1" in environment
                if is_rank and str(self.folder).encode() in (task / "cmdline").read_bytes():
                    parent = (task / "stat").read_text().rpartition(")")[2].split()[1]
                    if b"RANK=" not in Path(f"/proc/{parent}/environ").read_bytes():  # not a child that it has forked
                        return os.kill(int(task.name), number)
            except OSError:
                continue
        raise RuntimeError(f"rank {rank} is not there")

    def close(self) -> None:
        self.made.close()


def link_down(job: Job) -> None:
    job.made.link(1, "down")


def cut_five_times(job: Job) -> None:
    for pause in (11, 12, 13, 11, 12):
        job.made.link(1, "down")
        time.sleep(3)
        job.made.link(1, "up")
        time.sleep(pause)


def stop_for(seconds: float) -> Callable[[Job], None]:
    def stop(job: Job) -> None:
        job.send(3, signal.SIGSTOP)
        time.sleep(seconds)
        job.send(3, signal.SIGCONT)

    return stop


def lose(job: Job) -> None:
    for machine in range(2):
        job.made.drop(machine, "numgen", "random", "mod", "100", "<", "20")
    time.sleep(12)


def drop_large(job: Job) -> None:
    for machine in range(2):
        job.made.drop(machine, "ip", "length", ">", "900")


def set_up_behind_a_firewall(job: Job) -> None:
    for machine in range(2):
        job.made.block(machine, "30000-65535")
    job.go.touch()


@dataclass(frozen=True)
class Fault:
    name: str
    timeout: float  # Config.timeout
    begin: Callable[[Job], Any]
    told: tuple[int, ...] = (0, 1, 2, 3)  # ranks that get an error; none: the job goes on
    hostname: str | None = None
    waits: str = ""  # for the fault, before the buffer is made; "address": on a wrong one
    parent: int = -1  # the rank with a forked child


OTHER_MACHINE = (0, 1)  # where a rank is killed its launcher ends those of its machine, perhaps before they are told

FAULTS = [
    Fault("`kill -9` of rank 3", 10, lambda job: job.send(3, signal.SIGKILL), OTHER_MACHINE),
    Fault("rank 3 is stopped (SIGSTOP)", 10, lambda job: job.send(3, signal.SIGSTOP), (0, 1, 2)),
    Fault("rank 3 is stopped for 45 s", 100, stop_for(45), ()),
    Fault("machine 1's link is cut", 8, link_down),
    Fault("machine 1's link is cut", 60, link_down),
    Fault("five cuts of 3 s, 11 to 13 s apart", 60, cut_five_times, ()),
    Fault("machine 1 hears nothing of machine 0", 60, lambda job: job.made.drop(1, "ip", "saddr", job.made.address(0))),
    Fault("20 % of all packets are lost, 12 s", 60, lose, ()),
    Fault("packets of more than 900 bytes are lost", 60, drop_large),
    Fault("the launcher of machine 1 is killed", 60, lambda job: job.made.stop(1), OTHER_MACHINE),
    Fault("both machines have the same name", 60, lambda job: None, (), hostname="box"),
    Fault("machine 0 on the wrong interface", 10, lambda job: job.go.touch(), waits="address"),
    Fault("a firewall between the machines", 10, set_up_behind_a_firewall, waits="yes"),
    Fault(
        "`kill -9` of rank 3, which has forked",
        60,
        lambda job: job.send(3, signal.SIGKILL),
        OTHER_MACHINE,
        parent=3,
    ),
]


def show(fault: Fault) -> list[str]:
    """Lines of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder, fault.timeout, hostname=fault.hostname, waits=fault.waits, parent=fault.parent)
        try:
            began = time.time()
            fault.begin(job)
            head = f"{fault.name} | {fault.timeout:g} s"
            if not fault.told:
                return [f"| {head} | {'goes on' if job.wait_for_calls(range(4), time.time()) else 'STANDS STILL'} | |"]
            deadline = time.monotonic() + 4 * fault.timeout + 90
            while True:
                text = "".join(log_of(folder, machine).read_text() for machine in range(2))
                found = {int(rank): (float(at) - began, line) for rank, at, line in re.findall(PATTERN, text)}
                if set(found) >= set(fault.told) or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            job.close()
    said: dict[str, list[int]] = {}
    for rank, (_, line) in sorted(found.items()):
        said.setdefault(line, []).append(rank)
    lines = []
    for line, ranks in said.items():
        times = [found[rank][0] for rank in ranks]
        lines.append(f"| {head} | rank {', '.join(map(str, ranks))}: {line} | {min(times):.1f} to {max(times):.1f} s |")
        head = " | "
    if missing := sorted(set(fault.told) - set(found)):
        lines.append(f"| {head} | rank {', '.join(map(str, missing))}: NOTHING | |")
    return lines


PATTERN = r"RANK (\d) AT ([\d.]+): (.*)"


def main() -> int:
    if reason := why_not() or why_no_filter():
        print(reason, file=sys.stderr)
        return 2
    print("| what happens | `Config.timeout` | who is told what | after |\n|---|---|---|---|", flush=True)
    for fault in FAULTS:
        if not sys.argv[1:] or any(name in fault.name for name in sys.argv[1:]):
            print("\n".join(show(fault)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
