"""The scripts in examples/ do what they say: each checks its own result and is short enough to read."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import rank_processes

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
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
def test_script(arguments: list[str], says: str) -> None:
    name, *options = arguments
    if name in NEEDS_MEGATRON and find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    command = [str(EXAMPLES / name), *options]
    ranks = (
        rank_processes.run_ranks(command, RANKS[name])
        if RANKS[name]
        else rank_processes.run(command, [dict(os.environ)])
    )
    for status, text in ranks:
        assert status == 0 and text.count(says) == 1, text


@pytest.mark.parametrize("adapter", ["collectivex", "flashinfer_ep"])
def test_adapter(adapter: str) -> None:
    for status, text in rank_processes.run_ranks([ROOT / "tests/helpers/adapter_ranks.py", adapter], 2):
        assert status == 0 and text.count("all rows and sums are right") == 1, text


def test_an_own_model(tmp_path: Path) -> None:
    """The blocks of the quick start; DDP and FSDP2 give the same gradients."""
    section = (ROOT / "docs/quickstart.md").read_text().split("## In your own model\n")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    code = code.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')  # Inductor takes a minute
    code = code.replace('f"model_', f'f"{tmp_path}/model_')
    code += """
for ours, other in zip(model.parameters(), sharded.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, getattr(other.grad, "full_tensor", lambda: other.grad)())
copy.deepcopy(model).bfloat16()(x.bfloat16()).sum().backward()
print("both are equal", flush=True)
dist.destroy_process_group()
"""
    (tmp_path / "own_model.py").write_text(code)
    for status, text in rank_processes.run_ranks([str(tmp_path / "own_model.py")], 2):
        assert status == 0 and text.count("both are equal") == 1, text
