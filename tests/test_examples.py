"""The scripts in examples/ do what they say: each checks its own result and is short enough to read."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from forks import Forks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# How many torchrun would start; 0: the script runs by itself.
RANKS = {
    "local_cluster.py": 0,
    "torchrun.py": 2,
    "low_latency.py": 2,
    "survivors.py": 0,
    "sequences.py": 0,
    "megatron_layer.py": 2,
    "training_loop.py": 2,
}
NEEDS_MEGATRON = {"megatron_layer.py", "training_loop.py"}


def test_every_script_is_here_and_short() -> None:
    scripts = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(scripts) == set(RANKS)
    assert max(scripts.values()) <= 60, scripts


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["local_cluster.py"], "outputs and gradients are those of the dense layer"),
        (["torchrun.py", "--nodes", "2"], "every sum is right"),
        (["low_latency.py"], "every sum is right"),
        (["survivors.py"], "the others went on"),
        (["sequences.py"], "outputs and gradients are those of attention at home"),
        (["megatron_layer.py"], "gives Megatron's output and gradients"),
        (["training_loop.py"], "the loss fell"),
    ],
)
def test_script(forks: Forks, arguments: list[str], says: str) -> None:
    name, *options = arguments
    if name in NEEDS_MEGATRON and find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    command = [str(EXAMPLES / name), *options]
    ranks = forks.run_ranks(command, RANKS[name]) if RANKS[name] else forks.run(command, [dict(os.environ)])
    for status, text in ranks:
        assert status == 0 and text.count(says) == 1, text
