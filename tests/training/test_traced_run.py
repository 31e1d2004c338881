"""A run that records its routing: what is recorded is what it did, and it does the same."""

import pytest
import training_runs
from training_runs import deterministic, rows

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import numpy as np

from megatron_ep.cli import main as cli
from megatron_ep.tools.balance import trace

TINY = training_runs.RECIPES / "tiny_moe_cpu.yaml"
TOKENS, TOPK = 4 * 128, 4  # a rank and micro-batch, of the recipe
STEPS, STOPPED = 5, 3


def test_a_run_is_recorded(tmp_path, capsys):
    """Stopped and continued, with two micro-batches a step."""

    def train(out, steps, *arguments):
        settings = ("--set", "train.micro_batch_size=2", "--set", f"checkpoint.save_interval={STOPPED}")
        training_runs.run_forked(TINY, tmp_path / out, "--steps", steps, *settings, *arguments, world=4)
        return [deterministic(row) for row in rows(tmp_path / out)]

    traced = ("--set", f"dispatcher.trace={tmp_path / 'trace'}")
    train("traced", STOPPED, *traced)
    losses = train("traced", STEPS, "--resume", *traced)
    assert losses == train("untraced", STEPS)

    found = trace.read(tmp_path / "trace")
    [group] = found.groups
    keys = list(zip(group.steps, group.layers, group.micro_batches, strict=True))
    assert keys == [(step, layer, part) for step in range(1, STEPS + 1) for layer in (2, 3) for part in (0, 1)]
    assert (group.counts.sum(axis=2) == TOKENS // 2 * TOPK).all()
    assert found.expert_ranks == 4

    assert cli.main(["balance", str(tmp_path / "trace"), "--json", str(tmp_path / "all.json")]) == 0
    text = capsys.readouterr().out
    spread = group.counts.sum(axis=1).reshape(-1, 4, 4).sum(axis=2)
    second = (spread.max(axis=1) / spread.mean(axis=1))[group.layers == 2]
    assert f"{np.median(second):.3f}" in next(line for line in text.splitlines() if line.startswith("       2"))
