"""What goes wrong between three machines, one thing after the other in one run: named errors on all of them in bounded
time, and the bits of one machine after every reset."""

import os
import re
import signal
import time
from pathlib import Path

import machines
import pytest
from jobs_on_machines import COMPARED_CALLS, fork

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.needs(machines.why_not())
RANKS = 3
TIMEOUT = 5.0  # of a wait
SILENCE = 3.0  # after which a machine is lost
SHORT_S = 1.0  # that a link is down while waits go on: a busy machine takes its time to send again

# Calls for ever, compared with those of one machine. After a failure it waits for the file that says go on.
PROGRAM = (
    COMPARED_CALLS
    + """
from megatron_ep.fabrics import tcp
folder, tcp.SILENCE_S = Path(sys.argv[2]), float(sys.argv[3])
buffer = ep.Buffer(None, config)
assert buffer.fabric == "tcp", buffer.fabric
for failures in range(100):
    for calls in range(10**9):
        try:
            check(buffer)
        except ep.EPError as error:
            print(f"RANK {rank} FAILURE {failures} AT {time.time()}: {str(error).splitlines()[0]}", flush=True)
            break
        if calls % 20 == 0:
            print(f"RANK {rank} HAD {failures} FAILURES, {calls} CALLS AT {time.time()}", flush=True)
    while not (folder / f"go on {failures}").exists():
        time.sleep(0.05)
    buffer.reset()
"""
)


class Run:
    """The program on three machines."""

    def __init__(self, made: machines.Machines, folder: Path, timeout: float = TIMEOUT):
        self.made, self.folder, self.failures = made, folder, 0
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.processes = fork(made, folder, [program, timeout, folder, SILENCE], 1)

    def send(self, rank: int, number: signal.Signals) -> None:
        """To the program itself, which the first process of its machine has as a child, and that which makes it has
        that one."""
        pid = self.processes[rank].pid
        for _ in range(2):
            [pid] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        os.kill(pid, number)

    def wait_for_calls(self, since: float | None = None, limit: float = 60.0) -> None:
        """Until all have had calls that are right, since then."""
        self._wait(
            rf"HAD {self.failures} FAILURES, \d+ CALLS AT ([\d.]+)",
            range(RANKS),
            limit,
            time.time() if since is None else since,
        )

    def wait_for_failure(self, ranks: range, within: float, since: float) -> list[str]:
        """The errors of these ranks, which all have come in time."""
        found = self._wait(rf"FAILURE {self.failures} AT ([\d.]+): (.*)", ranks, within + 30, since)
        late = {rank: float(match[1]) - since for rank, match in found.items()}
        assert max(late.values()) < within, late
        return [match[2] for match in found.values()]

    def go_on(self) -> None:
        (self.folder / f"go on {self.failures}").touch()
        self.failures += 1
        self.wait_for_calls()

    def _wait(self, pattern: str, ranks: range, limit: float, since: float) -> dict[int, re.Match[str]]:
        deadline = time.monotonic() + limit
        while True:
            found = {}
            for rank in ranks:
                for match in re.finditer(rf"RANK {rank} {pattern}", (self.folder / f"{rank}.log").read_text()):
                    if float(match[1]) >= since:
                        found[rank] = match
            if len(found) == len(ranks):
                return found
            logs = [(self.folder / f"{rank}.log").read_text()[-600:] for rank in range(RANKS)]
            assert time.monotonic() < deadline, (pattern, logs)
            time.sleep(0.05)


@pytest.mark.nightly
def test_a_process_that_is_silent_for_30_s_is_waited_for(tmp_path):
    """It is stopped, its machine answers, and `Config.timeout` alone decides how long the others wait."""
    with machines.Machines(RANKS) as made:
        run = Run(made, tmp_path, timeout=90.0)
        run.wait_for_calls(limit=120)
        run.send(1, signal.SIGSTOP)
        time.sleep(30)
        run.send(1, signal.SIGCONT)
        run.wait_for_calls()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with machines.Machines(RANKS) as made:
        run = Run(made, tmp_path_factory.mktemp("run"))
        run.wait_for_calls(limit=120)
        yield run


@pytest.mark.needs(machines.why_no_filter())
def test_packets_that_do_not_arrive(run):
    made = run.made
    for machine in range(RANKS):
        made.drop(machine, "numgen", "random", "mod", "100", "<", "3")
    run.wait_for_calls()
    for machine in range(RANKS):
        made.pass_all(machine)
    run.wait_for_calls()

    cut = time.time()
    made.drop(0, "ip", "saddr", made.address(1))  # one way
    errors = run.wait_for_failure(range(RANKS), 3 * TIMEOUT + 4, cut)
    assert all("rank" in error for error in errors), errors
    made.pass_all(0)
    run.go_on()


@pytest.mark.nightly
def test_a_network_that_comes_back_in_time_each_time(run):
    """The kernel would compare its limit with the time since the first outage."""
    for pause in (10.5, 0):
        run.made.link(2, "down")
        time.sleep(SHORT_S)
        run.made.link(2, "up")
        run.wait_for_calls()
        time.sleep(pause)
    run.wait_for_calls()


def test_what_ends_a_call_and_what_does_not(run):
    made, everyone = run.made, range(RANKS)
    bound = 3 * TIMEOUT + 4  # that of a wait, of those who hear of it, and of an overloaded machine

    made.limit(1, "20mbit")
    run.wait_for_calls()
    made.unlimit(1)

    made.link(2, "down")
    time.sleep(SHORT_S)
    made.link(2, "up")
    run.wait_for_calls()

    cut = time.time()
    made.link(2, "down")
    for error in run.wait_for_failure(everyone, bound, cut):
        # Either the connection's own limit ends the call or, a moment earlier, that of the wait, which is as long.
        assert re.search(r"nothing was heard from (its machine|rank \d \(machine\d\)) for [3-9] s", error), error
    made.link(2, "up")
    run.go_on()

    stopped = time.time()
    run.send(1, signal.SIGSTOP)
    for error in run.wait_for_failure(range(0, RANKS, 2), bound, stopped):
        assert "timed out first" in error and "rank 1" in error, error
        assert re.search(r"the process of rank 1 has said nothing for \d s, though its machine answers", error), error
    run.send(1, signal.SIGCONT)
    run.go_on()

    killed = time.time()
    run.send(2, signal.SIGKILL)
    for error in run.wait_for_failure(range(RANKS - 1), TIMEOUT, killed):
        assert error.startswith("the connection to rank 2 broke"), error
