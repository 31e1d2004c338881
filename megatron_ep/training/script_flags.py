"""Converts a recipe of a real model for launchers: flags, environment, a torchrun line, a Slurm script; and runs it,
Megatron-LM's pretrain_gpt.py through megatron_ep.pretrain."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

from megatron_ep.megatron.options import NAMES
from megatron_ep.training.script_recipe import ScriptRecipe
from megatron_ep.training.sections import Section

# Flags of pretrain_gpt.py whose names differ from the fields of Megatron's TransformerConfig.
RENAMED = {"num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon"}
VARIABLE = "MEGATRON_LM"
SPECIAL = {"activation_func", "gated_linear_unit", "add_bias_linear", "share_embeddings_and_output_weights"}


def flags(recipe: ScriptRecipe) -> list[str]:
    """Returns the arguments of Megatron-LM's pretrain_gpt.py, 0.16.1 and newer. Flags of megatron_ep.pretrain choose
    the dispatcher (`ep_flags`)."""
    words: list[str] = []
    model = recipe.model
    sections: tuple[Section, ...] = (
        *(recipe.parallel, recipe.precision, recipe.model, recipe.train, recipe.optimizer, recipe.scheduler),
        *(recipe.dataset, recipe.tokenizer, recipe.checkpoint, recipe.logger),
    )
    for section in sections:
        words += _section(section.model_dump(exclude_none=True, exclude=SPECIAL))
    words += ["--optimizer", "adam", "--position-embedding-type", "rope"]
    if model.gated_linear_unit != (model.activation_func == "silu"):
        raise ValueError(
            f"model.activation_func is {model.activation_func} with model.gated_linear_unit {model.gated_linear_unit}, "
            "must be silu with True or gelu with False: pretrain_gpt.py has no others"
        )
    if model.gated_linear_unit:
        words.append("--swiglu")
    if not model.add_bias_linear:
        words.append("--disable-bias-linear")
    if not model.share_embeddings_and_output_weights:
        words.append("--untie-embeddings-and-output-weights")
    if model.num_query_groups is not None:
        words.append("--group-query-attention")
    words += ["--attention-softmax-in-fp32", "--no-create-attention-mask-in-dataloader"]
    return words


def ep_flags(recipe: ScriptRecipe) -> list[str]:
    """Returns the options of `megatron_ep.pretrain`, without the script."""
    if recipe.dispatcher.type != "ep":
        raise ValueError(
            f"dispatcher.type is {recipe.dispatcher.type}: pretrain_gpt.py has that one without this project"
        )
    words = [] if recipe.dispatcher.router == "megatron" else ["--ep-router", "fused"]
    if recipe.dispatcher.experts == "grouped":
        words += ["--ep-experts", "grouped"]
    if recipe.dispatcher.sequences:
        words.append("--ep-sequences")
    if recipe.dispatcher.trace is not None:
        words += ["--ep-trace", recipe.dispatcher.trace]
    for name, value in recipe.dispatcher.settings().items():
        is_switch = name in NAMES and value is True
        words += [f"--ep-{name.replace('_', '-')}", *([] if is_switch else [str(value)])]
    return words


def environment(recipe: ScriptRecipe) -> dict[str, str]:
    """Returns the environment variables of every rank. The recipe's section takes precedence."""
    overlap = recipe.parallel.overlap_moe_expert_parallel_comm
    # Megatron's TP overlap needs one hardware queue for its order; other overlap needs streams that run in parallel.
    is_parallel = overlap or recipe.dispatcher.moe_chunks > 1
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "32" if is_parallel else "1"}
    margins = {"NVTE_FWD_LAYERNORM_SM_MARGIN": "24", "NVTE_BWD_LAYERNORM_SM_MARGIN": "24"} if overlap else {}
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return connections | margins | allocator | recipe.environment


def command(recipe: ScriptRecipe, script: str) -> list[str]:
    """Returns the arguments of a rank's interpreter: -m megatron_ep.pretrain ... SCRIPT ARGS."""
    return ["-m", "megatron_ep.pretrain", *ep_flags(recipe), script, *flags(recipe)]


def torchrun(recipe: ScriptRecipe, script: str = "$MEGATRON_LM/pretrain_gpt.py") -> str:
    """Returns a shell command for every node. With several nodes, MASTER_ADDR is the address of the first."""
    nodes, ranks = recipe.topology.nodes, recipe.topology.ranks_per_node
    words = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    if nodes == 1:
        words.append("--standalone")
    else:
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "$MASTER_ADDR:29500"]
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment(recipe).items()]
    return broken([*variables, *map(_quoted, [*words, *command(recipe, script)])])


def sbatch(recipe: ScriptRecipe, name: str, script: str = "$MEGATRON_LM/pretrain_gpt.py") -> str:
    """Returns a Slurm batch script with a task per GPU, requeued if a node fails, which continues from the recipe's
    checkpoint.load."""
    exports = "\n".join(f"export {key}={shlex.quote(value)}" for key, value in environment(recipe).items())
    body = broken(map(_quoted, ["srun", "--kill-on-bad-exit=1", "python", *command(recipe, script)]))
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={recipe.topology.nodes}
#SBATCH --ntasks-per-node={recipe.topology.ranks_per_node}
#SBATCH --gpus-per-node={recipe.topology.ranks_per_node}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
set -euo pipefail
: "${{MEGATRON_LM:?names the Megatron-LM tree}}"
# Ranks meet at the first node; megatron_ep.pretrain makes torch's variables of Slurm's.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
{exports}

{body}
"""


def run(recipe: ScriptRecipe, tree: str | None, is_rank: bool) -> NoReturn:
    """Replaces this process by the training.

    recipe: the recipe, equal on all ranks.
    tree: Megatron-LM's tree. None: that of the variable MEGATRON_LM.
    is_rank: whether torchrun or Slurm started this process as one of the ranks; otherwise it becomes a torchrun that
        starts them all on this machine.

    Raises ValueError if no tree is given, if it has no pretrain_gpt.py, or if the ranks do not match the recipe.
    """
    tree = tree or os.environ.get(VARIABLE)
    if not tree:
        raise ValueError(f"--megatron-lm: needed for this recipe, or the variable {VARIABLE}: Megatron-LM's tree")
    script = Path(tree, "pretrain_gpt.py")
    if not script.is_file():
        raise ValueError(f"--megatron-lm ({VARIABLE}) {tree}: has no pretrain_gpt.py")
    words = command(recipe, str(script.resolve()))
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
    variables = environment(recipe) | dict(os.environ)  # variables of the user take precedence
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *words], variables)


def _section(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        flag = "--" + RENAMED.get(name, name).replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            continue
        elif name == "moe_layer_freq" and isinstance(value, list):
            words += [flag, "[" + ",".join(map(str, value)) + "]"]
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words


def _quoted(word: str) -> str:
    return f'"{word}"' if "$" in word else shlex.quote(word)


def broken(words: Any) -> str:
    """Returns a command broken into lines, with one flag and its values on each."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or word == "-m" or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n    ".join(lines)
