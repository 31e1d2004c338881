"""Whatever stands beside the core can be taken away: the rest imports, and README's example runs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEGATRON = "megatron_ep.megatron"
FABRICS = "megatron_ep.fabrics"
# What is hidden, with the modules that are about it alone.
EXTRAS = {
    "training": ["megatron_ep.training", "megatron_ep.cli.train", "megatron_ep.cli.recipe"],
    "sequences": ["megatron_ep.sequences", f"{MEGATRON}.attention", "megatron_ep.tools.sequences"],
    "deep_ep": ["megatron_ep.deep_ep"],
    "tools": ["megatron_ep.tools"],
    "low latency": ["megatron_ep.low_latency", "megatron_ep.deep_ep"],
    "chunks": [f"{MEGATRON}.chunks"],
    "routing trace": [f"{MEGATRON}.routing_trace", f"{MEGATRON}.trace_file", "megatron_ep.tools.balance"],
    "nvshmem": [f"{FABRICS}.nvshmem", f"{FABRICS}.nvshmem_env"],
    "nccl": [f"{FABRICS}.nccl"],
    "tcp": [f"{FABRICS}.tcp", f"{FABRICS}.proxied"],
    "verbs": [f"{FABRICS}.verbs"],
    "every network": [f"{FABRICS}.{name}" for name in ("nvshmem", "nvshmem_env", "nccl", "tcp", "proxied", "verbs")],
}
# Forks a process for each, so that torch and Megatron are imported once.
PROGRAM = """
import contextlib, importlib, io, os, re, sys, traceback
import torch
try:
    import megatron.core.models.gpt.gpt_layer_specs, megatron.core.optimizer
except ImportError:
    pass
torch.set_num_threads(1)
readme, names = sys.argv[1], sys.argv[2:]
example = re.search("```python\\n(.*?)```", open(readme).read(), re.S)[1]

class Hidden:
    def find_spec(self, name, *_):
        if any(f"{name}.".startswith(f"{hidden}.") for hidden in hides):
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

def run():
    sys.meta_path.insert(0, Hidden())
    for name in ["megatron_ep.normal.api", "megatron_ep.buffer.buffer", "megatron_ep.router.api", "megatron_ep.overlap",
                 "megatron_ep.low_latency.api", "megatron_ep.low_latency.rejoin", "megatron_ep.sequences.dispatcher",
                 "megatron_ep.deep_ep", "megatron_ep.cli.main", "megatron_ep.cli.env", "megatron_ep.pretrain",
                 "megatron_ep.megatron.layer", "megatron_ep.megatron.spec", "megatron_ep.megatron.plugin",
                 "megatron_ep.megatron.dispatcher", "megatron_ep.megatron.restart", "megatron_ep.training.loop",
                 "megatron_ep.tools.local_ranks", "megatron_ep.tools.balance"]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            own = any(f"{name}.".startswith(f"{hidden}.") for hidden in hides)
            if not own and (error.name or "").startswith("megatron_ep"):
                raise
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example, readme, "exec"), {})
    assert "output" in printed.getvalue()
    from megatron_ep.fabrics import choice
    facts = choice.report()
    for fabric, module in (("nvshmem's ibgda", "nvshmem_env"), ("mlx5", "verbs"), ("verbs", "verbs")):
        assert ("is hidden" in facts[fabric]) == (f"megatron_ep.fabrics.{module}" in hides), facts

for line in names:
    title, *hides = line.split("|")
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            print(f"without {title}:", traceback.format_exc(), flush=True)
            os._exit(1)
    print(title, "ends with", os.waitpid(child, 0)[1], flush=True)
"""


def run(*extras: str) -> str:
    arguments = ["|".join([name, *EXTRAS.get(name, [name])]) for name in extras]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ROOT / "README.md", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_extra_can_be_taken_away() -> None:
    assert run(*EXTRAS).splitlines() == [f"{name} ends with 0" for name in EXTRAS]


def test_what_is_needed_is_missed() -> None:
    """The program can fail."""
    assert "ends with 0" not in run("megatron_ep.normal.one_hop")
