"""Training on machines made of namespaces: host names, addresses, processes and shared memory apart. What goes wrong
between them is in test_faults.py."""

from pathlib import Path

import machines
import pytest
from jobs_on_machines import fork, log_of, start, torchrun

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
