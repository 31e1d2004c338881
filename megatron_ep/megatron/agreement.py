"""Before Megatron keeps what it has computed, all ranks of the job agree that none of them has failed.

A launch on a GPU can fail behind the back of a program that goes on (`megatron_ep.raise_if_failed`), and one rank that
stops at its step while the others take theirs leaves a job of two minds. So each rank asks itself, and a reduction of
one number tells all of them: once before a step of Megatron's optimizer, and before a checkpoint that follows no step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import layer_wise_optimizer  # noqa: F401, a subclass that enable() is to find
from megatron.core.optimizer.optimizer import MegatronOptimizer

import megatron_ep as ep

# A rank that has failed stays so long to tell the others, who may be somewhere else: it knows enough to end the job.
TELLING_S = 10.0

_replaced: list[tuple[Any, str, Callable[..., Any]]] = []
_in_step = False  # optimizers are made of optimizers
before_step: Callable[[], None] | None = None  # is called once all have agreed to take one
_has_agreed = False  # since the last checkpoint


def enable() -> None:
    """From now on all ranks of this job agree, in every step of a `MegatronOptimizer` and every
    `dist_checkpointing.save`, before anything is kept. Every rank calls it. Idempotent."""
    if _replaced:
        return
    for kind in _subclasses(MegatronOptimizer):
        if "step" in vars(kind):
            _replace(kind, "step", _agreed_step)
    _replace(dist_checkpointing, "save", _agreed_save)


def disable() -> None:
    """Nobody is asked any more. Idempotent."""
    while _replaced:
        setattr(*_replaced.pop())


def agree(before: str) -> None:
    """Returns on all ranks of the default group, or raises on all of them. Collective.

    Args:
        before: what would keep the results, for the text.

    Raises:
        EPError: what `megatron_ep.raise_if_failed` raises here, or, where nothing failed, EPAbortError, which names a
            rank on which something did.
    """
    own: ep.EPError | None = None
    try:
        ep.raise_if_failed()
    except ep.EPError as error:
        own = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        flag = torch.tensor([0 if own is None else dist.get_rank() + 1], device=_device())
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
        if own is None:
            work.wait()
            if flag.item():
                raise ep.EPAbortError(
                    f"rank {int(flag) - 1} of the job failed before {before}: nothing of this step is kept; what that "
                    "rank says tells why"
                )
        else:
            deadline = time.monotonic() + TELLING_S
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(1e-3)
    if own is not None:
        raise own


def _agreed_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def agreed(optimizer: MegatronOptimizer, *args: Any, **kwargs: Any) -> Any:
        global _in_step, _has_agreed
        if _in_step or _is_capturing():  # a graph asks nobody when it is replayed: see _agreed_save
            return step(optimizer, *args, **kwargs)
        agree("the optimizer's step")
        if before_step is not None:
            before_step()
        _in_step = _has_agreed = True
        try:
            return step(optimizer, *args, **kwargs)
        finally:
            _in_step = False

    return agreed


def _agreed_save(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def agreed(*args: Any, **kwargs: Any) -> Any:
        global _has_agreed
        had_agreed, _has_agreed = _has_agreed, False
        if had_agreed:  # what is saved is what a step has left that all ranks took
            ep.raise_if_failed()
        else:
            agree("a checkpoint")
        return save(*args, **kwargs)

    return agreed


def _replace(owner: Any, name: str, made_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = vars(owner)[name]
    _replaced.append((owner, name, original))
    setattr(owner, name, made_of(original))


def _subclasses(kind: type) -> set[type]:
    return set(kind.__subclasses__()).union(*map(_subclasses, kind.__subclasses__()))


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _device() -> torch.device:
    """Where the default group reduces, on the host if it can."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config() else "cuda")
