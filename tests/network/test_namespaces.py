"""Training and failures on machines made of namespaces: host names, addresses, processes and shared memory apart."""

import re
import time
from pathlib import Path

import machines
import pytest
from jobs_on_machines import fork, log_of, run_for_ever, start, torchrun, wait_for

from megatron_ep.fabrics import tcp

pytestmark = pytest.mark.skipif(bool(machines.why_not()), reason=str(machines.why_not()))


@pytest.fixture
def two():
    with machines.Machines(2) as made:
        yield made


def texts(processes, folder: Path) -> list[str]:
    statuses = [process.wait(300) for process in processes]
    found = [log_of(folder, machine).read_text() for machine in range(len(processes))]
    assert not any(statuses), found
    return found


@pytest.mark.nightly
def test_the_example_on_two_machines(two, tmp_path):
    command = torchrun(two, "examples/torchrun.py", "--nodes", "2", ranks=2)
    for machine, text in enumerate(texts(start(two, tmp_path, command), tmp_path)):
        assert text.count("every sum is right") == 2, f"machine {machine}: {text}"  # torchrun's own end may be noisy


def losses(folder: Path) -> list[str]:
    return (folder / "loss.csv").read_text().splitlines()


@pytest.mark.nightly
def test_training_on_two_machines_has_the_losses_of_one(two, tmp_path):
    train = ("-m", "megatron_ep.cli.main", "train", "tiny_moe_cpu", "--steps", "3", "--out")
    texts(fork(two, tmp_path, [*train, tmp_path / "two"], 2), tmp_path)
    with machines.Machines(1) as one:
        texts(fork(one, tmp_path, [*train, tmp_path / "one"], 4), tmp_path)
    column = losses(tmp_path / "one")[0].split(",").index("loss")
    both = [[line.split(",")[column] for line in losses(tmp_path / name)] for name in ("one", "two")]
    assert both[0] == both[1] and len(both[0]) == 4


def test_a_machine_that_is_gone_is_heard_of_on_the_other(two, tmp_path):
    run_for_ever(two, tmp_path, 2, 30, "cpu", 240)
    killed = time.time()
    two.stop(1)
    for match in wait_for(tmp_path, r"RANK ([01]) AT ([\d.]+): (.*)", 2, 20):
        assert float(match[2]) - killed < tcp.SILENCE_S, match[0]
        assert re.search(r"connection to rank [23] broke|rank [23]", match[3])


def test_a_network_that_is_cut_ends_in_the_bound(two, tmp_path):
    run_for_ever(two, tmp_path, 2, 4, "cpu", 240)
    cut = time.time()
    two.link(1, "down")
    for match in wait_for(tmp_path, r"RANK (\d) AT ([\d.]+): (.*)", 4, 30):
        assert 3 < float(match[2]) - cut < 20, match[0]
        others = "2, 3 (machine1)" if match[1] in "01" else "0, 1 (machine0)"
        says = f"nothing was heard from rank {others} for "
        assert says in match[3] and match[3].endswith(" s: the network between, or that machine")


def test_a_network_that_comes_back_in_time_is_no_failure(two, tmp_path):
    run_for_ever(two, tmp_path, 2, 20, "cpu", 240)
    two.link(1, "down")
    time.sleep(1)
    two.link(1, "up")
    time.sleep(5)
    assert not [log for log in tmp_path.glob("*.log") if " AT " in log.read_text()]
