"""Checkpoints from which a run continues with identical results: a directory per step, with a file per rank."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ep.training.data import Corpus
from megatron_ep.training.recipe import Recipe

FREE_TO_CHANGE = ("train.train_iters", "train.distributed_timeout", "dataset.path")
DEVICE = "train.device"  # may change, but random states exist for the old device only
FREE_SECTIONS = ("dispatcher", "checkpoint", "logger")


class Checkpoints:
    """Saves and restores everything a step depends on: weights, expert bias, AdamW, schedule, random states, step.

    The data order needs no state, see `data.Samples`; the fingerprint of the corpus must be equal. If a run changes
    train.device, it continues with the same weights, and with new random states from its seed.

    Raises (`load`):
        ValueError: no checkpoint, or one of another model, schedule, topology or corpus; names the differences.
    """

    def __init__(
        self,
        directory: Path,
        recipe: Recipe,
        corpus: Corpus,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self._directory = directory
        self._origin = _origin(recipe) | {"corpus": corpus.fingerprint}
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._rank = torch.distributed.get_rank()
        self._on_gpu = recipe.train.device == "cuda"

    def save(self, step: int) -> None:
        """Writes step_N. Collective. The directory gets its name when the files of all ranks are complete. If a rank
        cannot write, raises OSError on all ranks and removes the files."""
        complete = self._directory / f"step_{step:08d}"
        partial = complete.with_suffix(".partial")
        state = {
            "origin": self._origin,
            "step": step,
            "model": self._model.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "rng_gpu": torch.cuda.get_rng_state() if self._on_gpu else None,
            "rng_tracker": get_cuda_rng_tracker().get_states(),
        }

        def make() -> None:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)

        def write() -> None:
            with open(self._file(partial), "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        def rename() -> None:
            if self._rank == 0:
                shutil.rmtree(complete, ignore_errors=True)
                partial.rename(complete)

        try:
            for part in (make, write, rename):
                _on_all_ranks(part, partial)
        except OSError:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def load(self) -> int:
        """Restores the latest checkpoint and returns its step."""
        saved = sorted(self._directory.glob("step_*[0-9]"))
        if not saved:
            raise ValueError(f"--resume: no checkpoint in {self._directory}")
        file = self._file(saved[-1])
        if not file.is_file():
            raise ValueError(f"--resume: {saved[-1]} has no {file.name}; its run had another number of ranks")
        state = torch.load(file, weights_only=True, map_location="cpu")
        differing = [
            f"{key} was {state['origin'].get(key)!r}, is {self._origin.get(key)!r}"
            for key in sorted(self._origin | state["origin"])
            if self._origin.get(key) != state["origin"].get(key) and key != DEVICE
        ]
        if differing:
            raise ValueError("\n  ".join([f"--resume: {saved[-1]} belongs to another run:", *differing]))
        self._model.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        if state["origin"][DEVICE] == self._origin[DEVICE]:
            torch.set_rng_state(state["rng"])
            get_cuda_rng_tracker().set_states(state["rng_tracker"])
            if self._on_gpu:
                torch.cuda.set_rng_state(state["rng_gpu"])
        return state["step"]

    def _file(self, directory: Path) -> Path:
        return directory / f"rank_{self._rank:05d}.pt"


def _on_all_ranks(step: Callable[[], None], path: Path) -> None:
    """Runs a step on all ranks. Collective. If it fails on a rank, raises OSError with the path on all."""
    failure: BaseException | None = None
    number = 0
    try:
        step()
    except (OSError, RuntimeError) as error:  # torch converts errors of files to RuntimeError
        failure = error
        while failure is not None and not isinstance(failure, OSError):
            failure = failure.__context__
        if failure is None:
            raise
        number = failure.errno or errno.EIO
    worst = torch.tensor(number)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    if number := int(worst):
        raise OSError(number, os.strerror(number), str(path)) from failure


def _origin(recipe: Recipe) -> dict[str, Any]:
    """Returns what must be equal if a run continues another: the recipe's flat keys, except those that do not affect
    steps."""
    flat = {
        f"{section}.{key}": value
        for section, keys in recipe.model_dump().items()
        if section not in FREE_SECTIONS
        for key, value in keys.items()
    }
    flat["dispatcher.experts"] = recipe.dispatcher.experts  # whose states of the optimizer have another order
    return {key: value for key, value in flat.items() if key not in FREE_TO_CHANGE}
