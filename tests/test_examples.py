"""The scripts in examples/ do what they say: each checks its own result and is short enough to read."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RANKS = {"local_cluster.py": 0, "torchrun.py": 2, "megatron_layer.py": 2}  # 0: started by itself


def test_every_script_is_here_and_short() -> None:
    scripts = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(scripts) == set(RANKS)
    assert max(scripts.values()) < 60, scripts


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["local_cluster.py"], "outputs and gradients are those of the dense layer"),
        (["torchrun.py", "--nodes", "2"], "every sum is right"),
        (["megatron_layer.py"], "gives Megatron's output and gradients"),
    ],
)
def test_script(arguments: list[str], says: str) -> None:
    name, *options = arguments
    if name == "megatron_layer.py" and find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    command = [sys.executable]
    if RANKS[name]:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[name]}"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *options], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(says) == max(1, RANKS[name]), done.stdout
