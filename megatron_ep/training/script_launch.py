"""`megatron-ep train` of a recipe with a section `parallel`: Megatron-LM's pretrain_gpt.py through
megatron_ep.pretrain."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from megatron_ep.training import script_flags
from megatron_ep.training.script_recipe import ScriptRecipe

VARIABLE = "MEGATRON_LM"


def find_script(tree: str | None) -> Path:
    """pretrain_gpt.py in this tree of Megatron-LM, or (None) in the one that MEGATRON_LM names.

    Raises:
        ValueError: none is named, or it is not there.
    """
    tree = tree or os.environ.get(VARIABLE)
    if not tree:
        raise ValueError(f"--megatron-lm: needed for this recipe, or the variable {VARIABLE}: Megatron-LM's tree")
    script = Path(tree, "pretrain_gpt.py")
    if not script.is_file():
        raise ValueError(f"--megatron-lm ({VARIABLE}) {tree}: has no pretrain_gpt.py")
    return script.resolve()


def run(recipe: ScriptRecipe, tree: str | None, is_rank: bool) -> NoReturn:
    """Becomes the training: this process is replaced.

    Args:
        recipe: the same on every rank.
        tree: see `find_script`.
        is_rank: whether torchrun or Slurm started this process as one of the ranks; otherwise it becomes a torchrun
            that starts them all on this machine.

    Raises:
        ValueError: there is no script, or the ranks do not fit the recipe.
    """
    script = find_script(tree)
    words = script_flags.command(recipe, str(script))
    topology = recipe.topology
    if is_rank:
        if int(os.environ["WORLD_SIZE"]) != topology.world_size:
            raise ValueError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the recipe's topology is {topology.nodes} x "
                f"{topology.ranks_per_node} = {topology.world_size} ranks"
            )
    elif topology.nodes > 1:
        raise ValueError(
            f"topology.nodes is {topology.nodes}: start it on all of them, see megatron-ep recipe show --as sbatch"
        )
    else:
        ranks = str(topology.ranks_per_node)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]
    variables = script_flags.environment(recipe) | dict(os.environ)  # what is set already wins
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *words], variables)
