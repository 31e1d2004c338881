"""Megatron-Core from 0.20 on repeats steps that were over the budget of moe_expert_rank_capacity_factor, and makes more
room: by its own code, on the host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import megatron_trees
import pytest

TREES = [
    tree
    for tree in megatron_trees.ALL
    if "check_required_capacity" in (tree / "megatron/core/transformer/moe/token_dispatcher.py").read_text()
]
LACK = None if TREES else f"no Megatron-LM of 0.20 or later, such as main, in {megatron_trees.CACHE}"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.needs(LACK if TREES or not megatron_trees.LACK_ALL else megatron_trees.LACK_ALL),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_a_run_that_overflows_twice_ends_as_one_that_never_does(tree):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).parents[1] / "helpers/overflow_run.py", tree],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    never, twice = json.loads(line.removeprefix("FIGURES ")).values()
    for rank, expected in zip(twice, never, strict=True):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        first, second = rank["repeats"]
        assert expected["repeats"] == [] and first < second, (
            "room for the most rows yet, which held until there were more"
        )
        # of 2 ranks x 16 tokens x top-2 all
        assert second == 64 and rank["suggested"] == [first / 32, 2.0]
