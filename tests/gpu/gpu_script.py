"""A run of Megatron-LM's pretrain_gpt.py on this machine's GPUs, a process a GPU, its steps measured."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from megatron_ep.megatron import flags
from megatron_ep.training import script_flags

ROOT = Path(__file__).resolve().parents[2]
OURS, ALLTOALL, FLEX = "EPTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher"
ALLTOALL_WORDS = (flags.TYPE, "alltoall", "--moe-permute-fusion")


def megatron_lm():
    """The tree of the installed megatron-core's version. Exits if there is none."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import megatron_trees

    return megatron_trees.INSTALLED or sys.exit(megatron_trees.LACK)


def gpus_taken():
    """How many of the GPUs such a run takes."""
    return max((count for count in (1, 2, 4) if count <= torch.cuda.device_count()), default=0)


def start(recipe, tree, out, slug, *, words=(), ep_flags=(), dispatcher=OURS, fuses_gradients=False, **variables):
    """Starts it; give what is returned to `finish`.

    Args:
        recipe: a script recipe.
        tree: of Megatron-LM.
        out: folder for logs and results, which begin with `slug`.
        words: flags of pretrain_gpt.py beside the recipe's.
        ep_flags: options of megatron_ep.pretrain beside the recipe's; None: the script without this project.
        dispatcher: class that every MoE layer must have.
        fuses_gradients: whether products add weight gradients to main_grad; see fused_weight_gradient_mlp_cuda.py.
        variables: see `tests/gpu/train_slice_rank.py`.
    """
    result, log = out / f"{slug}.json", out / f"{slug}.log"
    result.unlink(missing_ok=True)
    fusion = [] if fuses_gradients else ["--no-gradient-accumulation-fusion"]
    words = [*script_flags.flags(recipe), *fusion, *words]
    script = str(ROOT / "tests" / "gpu" / "train_slice_rank.py")
    if ep_flags is None:
        command = [script, *words]
    else:
        command = ["-m", "megatron_ep.pretrain", *script_flags.ep_flags(recipe), *ep_flags, script, *words]
    environment = os.environ | script_flags.environment(recipe) | variables
    environment |= {
        "MEGATRON_LM": str(tree),
        "PYTHONPATH": os.pathsep.join([str(Path(tree).resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RESULT": str(result),
    }
    ranks = str(recipe.topology.world_size)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *command]
    with open(log, "w") as file:
        process = subprocess.Popen(
            launch, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return process, result, log, dispatcher


def finish(started, limit):
    """What its rank 0 has measured, after at most `limit` seconds. RuntimeError: it failed, and why."""
    process, result, log, dispatcher = started
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=limit)
    end = f"not done after {limit:.0f} s" if process.poll() is None else f"exit status {process.returncode}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])  # before torchrun tells how it was stopped
    if stop(started) or not result.is_file():
        raise RuntimeError(f"{end}\n{tail}")
    measured = json.loads(result.read_text())
    if measured["dispatchers"] != [dispatcher]:
        raise RuntimeError(f"ran with {measured['dispatchers']}, not {dispatcher}")
    return measured


def stop(started):
    """Ends it if it is still under way. Its exit status."""
    process = started[0]
    if process.poll() is None:
        process.terminate()  # torchrun ends its ranks, which are sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=45)  # it gives them 30 s
        process.kill()
    return process.wait()
