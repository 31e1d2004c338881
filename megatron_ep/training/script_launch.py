"""`megatron-ep train` for a recipe with a section `parallel`: runs Megatron-LM's pretrain_gpt.py through
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
    """Returns the path of pretrain_gpt.py in a tree of Megatron-LM. tree: None uses the variable MEGATRON_LM.

    Raises ValueError if no tree is given, or it has no pretrain_gpt.py.
    """
    tree = tree or os.environ.get(VARIABLE)
    if not tree:
        raise ValueError(f"--megatron-lm: needed for this recipe, or the variable {VARIABLE}: Megatron-LM's tree")
    script = Path(tree, "pretrain_gpt.py")
    if not script.is_file():
        raise ValueError(f"--megatron-lm ({VARIABLE}) {tree}: has no pretrain_gpt.py")
    return script.resolve()


def run(recipe: ScriptRecipe, tree: str | None, is_rank: bool) -> NoReturn:
    """Replaces this process by the training.

    recipe: the recipe, equal on all ranks.
    tree: see `find_script`.
    is_rank: whether torchrun or Slurm started this process as one of the ranks; otherwise it becomes a torchrun that
        starts them all on this machine.

    Raises ValueError if there is no script, or the ranks do not match the recipe.
    """
    script = find_script(tree)
    words = script_flags.command(recipe, str(script))
    topology = recipe.topology
    if is_rank:
        topology.require_job()
    elif topology.nodes > 1:
        raise ValueError(
            f"topology.nodes is {topology.nodes}: start it on all of them, see megatron-ep recipe show --as sbatch"
        )
    else:
        ranks = str(topology.ranks_per_node)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]
    variables = script_flags.environment(recipe) | dict(os.environ)  # variables of the user take precedence
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *words], variables)
