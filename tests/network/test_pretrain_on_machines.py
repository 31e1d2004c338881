"""Megatron-LM's own pretrain_gpt.py on two machines made of namespaces: losses, norms and gradients are those of one
machine, bit for bit."""

import sys
from pathlib import Path

import machines
import megatron_trees
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TREE = megatron_trees.INSTALLED
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.needs(megatron_trees.LACK),
    pytest.mark.skipif(bool(machines.why_not()), reason=str(machines.why_not())),
]
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


def train(folder: Path, count: int) -> list[dict]:
    """Four ranks on so many machines, as two nodes: what each recorded, in the order of ranks."""
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    launcher = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes {count} --node-rank $MACHINE "
        f"--nproc-per-node {4 // count} --master-addr {machines.Machines.address(0)} --master-port 29500"
    )
    arguments = f"{program} {ROOT / 'tests' / 'helpers'} {TREE} {folder} {FLAGS}"
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MEGATRON_EP_RANKS_PER_NODE": "2",
    }
    with machines.Machines(count) as made:
        running = []
        for machine in range(count):
            with (folder / f"{machine}.log").open("w") as log:
                command = ["sh", "-c", f"{launcher} {arguments}"]
                running.append(made.start(machine, command, environment, stdout=log, stderr=log, cwd=ROOT))
        statuses = [process.wait(240) for process in running]
    texts = [log.read_text() for log in sorted(folder.glob("*.log"))]
    assert statuses == [0] * count, [text[-3000:] for text in texts]
    assert any("fabric: tcp (host backend on 2 machines" in text for text in texts) == (count == 2), texts
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


def test_two_machines_train_as_one(tmp_path):
    one, two = (train(tmp_path / str(count), count) for count in (1, 2))
    for here, there in zip(one, two, strict=True):
        assert set(there["dispatchers"]) == {"EPTokenDispatcher"}
        assert len(there["losses"]) == 3 and here["losses"] == there["losses"] and here["norms"] == there["norms"]
        assert here["gradients"].keys() == there["gradients"].keys()
        for name, gradient in here["gradients"].items():
            assert torch.equal(gradient, there["gradients"][name]), name
