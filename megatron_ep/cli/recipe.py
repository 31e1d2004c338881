"""`megatron-ep recipe show`: a recipe of a real model in the words of launchers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser("megatron-ep recipe", description="Shows recipes in the words of launchers.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="show")
    show = actions.add_parser("show", help="print a recipe's flags, environment, torchrun line or Slurm script")
    show.add_argument("recipe", metavar="RECIPE", help="as for train; one with a section parallel")
    show.add_argument(
        "--as",
        dest="form",
        choices=("flags", "env", "torchrun", "sbatch"),
        default="flags",
        help="flags: of pretrain_gpt.py (default); env: variables; torchrun: a command; sbatch: a batch script",
    )
    show.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a recipe's value"
    )
    options = parser.parse_args(argv)
    from megatron_ep.training import script_flags, script_recipe

    if not script_recipe.is_script_recipe(options.recipe):
        raise ValueError(
            f"recipe {options.recipe} has no section parallel, so it is not one for Megatron-LM's pretrain_gpt.py; "
            f"megatron-ep train {options.recipe} runs it"
        )
    loaded = script_recipe.load(options.recipe, options.overrides)
    if options.form == "flags":
        print(script_flags.broken(map(shlex.quote, script_flags.flags(loaded))))
    elif options.form == "env":
        print("\n".join(f"{k}={shlex.quote(v)}" for k, v in script_flags.environment(loaded).items()))
    elif options.form == "torchrun":
        print(script_flags.torchrun(loaded))
    else:
        print(script_flags.sbatch(loaded, Path(options.recipe).stem), end="")
    return 0
