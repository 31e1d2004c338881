"""Training on machines made of namespaces: host names, addresses, processes and shared memory apart. Losses, and of
Megatron-LM's own pretrain_gpt.py norms and gradients, are those of one machine, bit for bit. What goes wrong between
them is in test_faults.py."""

from pathlib import Path

import machines
import megatron_trees
import pytest
import torch
from jobs_on_machines import ROOT, fork, log_of, start, torchrun

pytestmark = [pytest.mark.nightly, pytest.mark.needs(machines.why_not())]


@pytest.fixture
def two():
    with machines.Machines(2) as made:
        yield made


def texts(processes, folder: Path) -> list[str]:
    statuses = [process.wait(300) for process in processes]
    found = [log_of(folder, machine).read_text() for machine in range(len(processes))]
    assert not any(statuses), found
    return found


def test_the_example_on_two_machines(two, tmp_path):
    command = torchrun(two, "examples/torchrun.py", "--nodes", "2", ranks=2)
    for machine, text in enumerate(texts(start(two, tmp_path, command), tmp_path)):
        assert text.count("every sum is right") == 2, f"machine {machine}: {text}"  # torchrun's own end may be noisy


def losses(folder: Path) -> list[str]:
    return (folder / "loss.csv").read_text().splitlines()


def test_training_on_two_machines_has_the_losses_of_one(two, tmp_path):
    train = ("-m", "megatron_ep.cli.main", "train", "tiny_moe_cpu", "--steps", "3", "--out")
    texts(fork(two, tmp_path, [*train, tmp_path / "two"], 2), tmp_path)
    with machines.Machines(1) as one:
        texts(fork(one, tmp_path, [*train, tmp_path / "one"], 4), tmp_path)
    column = losses(tmp_path / "one")[0].split(",").index("loss")
    both = [[line.split(",")[column] for line in losses(tmp_path / name)] for name in ("one", "two")]
    assert both[0] == both[1] and len(both[0]) == 4


FLAGS = "--num-layers 2 --expert-model-parallel-size 4 --train-iters 3"

PROGRAM = """
import os, sys, torch
_, helpers, tree, out, *flags = sys.argv
sys.path[:0] = [helpers, tree]
from megatron_ep.megatron.stand_ins import host_script
torch.set_num_threads(1)
host_script.enable()
import pretrain_gpt_runs
from megatron_ep import pretrain
record = pretrain_gpt_runs.recorded_steps()
pretrain.main(["--ep-host", tree + "/pretrain_gpt.py", *pretrain_gpt_runs.TINY.split(), *flags])
torch.save(record, os.path.join(out, "rank" + os.environ["RANK"] + ".pt"))
"""


def pretrained(folder: Path, count: int) -> list[dict]:
    """Four ranks on so many machines, as two nodes: what each recorded, in the order of ranks."""
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "MEGATRON_EP_RANKS_PER_NODE": "2"}
    given = [program, ROOT / "tests" / "helpers", megatron_trees.INSTALLED, folder, *FLAGS.split()]
    with machines.Machines(count) as made:
        command = torchrun(made, *map(str, given), ranks=4 // count)
        said = texts(start(made, folder, command, **variables), folder)
    assert any("fabric: tcp (host backend on 2 machines" in text for text in said) == (count == 2), said
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.mark.needs(megatron_trees.LACK)
def test_megatrons_script_on_two_machines(tmp_path):
    one, two = (pretrained(tmp_path / str(count), count) for count in (1, 2))
    for here, there in zip(one, two, strict=True):
        assert set(there["dispatchers"]) == {"EPTokenDispatcher"}
        assert len(there["losses"]) == 3 and here["losses"] == there["losses"] and here["norms"] == there["norms"]
        assert here["gradients"].keys() == there["gradients"].keys()
        for name, gradient in here["gradients"].items():
            assert torch.equal(gradient, there["gradients"][name]), name
