"""`megatron-ep train`: trains the model of a recipe."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ep.training import recipe


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-ep train",
        description="Trains the model of a recipe. By hand: starts the recipe's ranks on this machine. Under torchrun "
        "or in a Slurm job step: this process is one of the ranks.",
        epilog="example: megatron-ep train tiny_moe_cpu --steps 200 --set dispatcher.type=alltoall",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, or the name of one that comes with megatron_ep")
    parser.add_argument("--steps", type=int, metavar="N", help="train until step N (train.train_iters)")
    parser.add_argument("--data", metavar="FILE", help="text to train on, UTF-8 (dataset.path)")
    parser.add_argument(
        "--out", metavar="DIR", help="receives loss.csv, checkpoints/ and logs/ (default: runs/RECIPE-TIME)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out DIR")
    parser.add_argument(
        "--megatron-lm",
        metavar="DIR",
        help="Megatron-LM's tree, for recipes with a section parallel (default: the variable MEGATRON_LM)",
    )
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a recipe's value"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks, or is one of them; returns the exit status."""
    options = _parser().parse_args(arguments)
    for module in ("megatron.core", "pydantic", "yaml"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise ValueError(f"needs {module}: pip install 'megatron_ep[megatron,train]'")
    from megatron_ep.meeting import job
    from megatron_ep.training import launcher, recipe, script_flags, script_recipe

    is_rank = job.adopt()
    overrides = list(options.overrides)
    if options.steps is not None:
        overrides.append(f"train.train_iters={options.steps}")
    if script_recipe.is_script_recipe(options.recipe):
        for name in ("data", "out", "resume"):
            if getattr(options, name):
                raise ValueError(f"--{name}: of small recipes; this one has dataset.data_path, checkpoint.save, load")
        script_flags.run(script_recipe.load(options.recipe, overrides), options.megatron_lm, is_rank)
    if options.data is not None:
        overrides.append(f"dataset.path={json.dumps(os.path.abspath(options.data))}")
    loaded = recipe.load(options.recipe, overrides)
    out = _output_directory(options, is_rank)
    # A launcher that restarts a rank repeats the command of a new run.
    resume = options.resume or (job.is_restarted() and bool(_saved(out)))
    _check_run(loaded, out, resume, is_rank)
    if is_rank:
        return _train_rank(loaded, out, resume)
    try:
        launcher.launch(
            loaded.topology.world_size,
            ["train", *arguments, "--out", str(out)],
            log_dir=out / "logs",
            threads_per_rank=loaded.train.threads_per_rank,
        )
    except (launcher.LaunchError, OSError) as error:
        print(f"megatron-ep: {error}", file=sys.stderr)
        return error.status if isinstance(error, launcher.LaunchError) else 1
    return 0


def _train_rank(loaded: recipe.Recipe, out: Path, resume: bool) -> int:
    from torch.distributed.elastic.multiprocessing.errors import record

    from megatron_ep.training import launcher

    launcher.die_with_parent()

    def run() -> None:
        from megatron_ep.training.loop import train

        train(loaded, out, resume)

    try:
        record(run)()  # tells the launcher, too
    except OSError as error:
        if error.filename is None:
            raise
        print(f"megatron-ep: {error}", file=sys.stderr)
        return 1
    return 0


def _output_directory(options: argparse.Namespace, is_rank: bool) -> Path:
    if options.out is not None:
        return Path(options.out).resolve()
    if options.resume:
        raise ValueError("--resume: needs --out DIR, the directory of the run to continue")
    if is_rank:
        raise ValueError("--out: under torchrun or Slurm every rank needs the same --out DIR")
    return Path("runs", f"{Path(options.recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()


def _saved(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("step_*[0-9]"))


def _check_run(loaded: recipe.Recipe, out: Path, resume: bool, is_rank: bool) -> None:
    saved = _saved(out)
    if resume and not saved:
        raise ValueError(f"--resume: no checkpoint in {out / 'checkpoints'}")
    if saved and not resume:
        raise ValueError(
            f"--out {out}: holds a run with checkpoints; --resume continues it, or choose another directory"
        )
    text = loaded.dataset.path
    if text is not None and not (os.path.isfile(text) and os.access(text, os.R_OK)):
        raise ValueError(f"dataset.path (--data) {loaded.dataset.path}: no readable file")
    ranks_here = loaded.topology.world_size
    if is_rank:
        loaded.topology.require_job()
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", loaded.topology.ranks_per_node))
    if loaded.train.device == "cuda":
        _check_gpus(loaded, ranks_here)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from None


def _check_gpus(loaded: recipe.Recipe, ranks_here: int) -> None:
    import torch

    from megatron_ep.buffer.sizes import default_sms
    from megatron_ep.config import Topology
    from megatron_ep.fabrics.gpu import check_device

    try:
        check_device("cuda")
    except ValueError as error:
        raise ValueError(f"train.device: {error}") from None
    gpus = torch.cuda.device_count()
    ranks = -(-ranks_here // gpus)
    default = default_sms(Topology(loaded.topology.nodes, loaded.topology.ranks_per_node))
    wanted = ranks * (loaded.dispatcher.num_sms or default)
    sms = min(torch.cuda.get_device_properties(gpu).multi_processor_count for gpu in range(gpus))
    if loaded.dispatcher.type == "ep" and wanted > sms:
        raise ValueError(
            f"dispatcher.num_sms is {loaded.dispatcher.num_sms or f'{default} by default'}, must be at most "
            f"{sms // ranks} for {ranks} ranks on a GPU of {sms} SMs: they wait for each other"
        )
