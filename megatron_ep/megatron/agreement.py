"""Keeps Megatron from taking a step, or writing a checkpoint, with results of a failed call.

A launch on a GPU may fail after its call has returned, and its outputs are then NaN (`megatron_ep.raise_if_failed`).
Before each step of a Megatron optimizer every rank checks its own buffers. A rank that knows of a failure raises, and
publishes it in the store of torch.distributed. Other ranks do not wait.

A rank may check before the failure happens, or share no buffer with the ranks of the failed call. It then receives NaN
in its gradients through Megatron's reductions. Therefore it checks again when the gradients are ready: if they, or
their norm, are not finite, it reads the store before parameters are changed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import layer_wise_optimizer  # noqa: F401, a subclass that enable() must find
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.distributed_c10d import _get_default_store

import megatron_ep as ep
from megatron_ep.diagnosis import failures
from megatron_ep.meeting import codec
from megatron_ep.meeting.stores import STORE_S, Wait, ask, in_thread, read, write

T = TypeVar("T")

# A failure is in the store after at most 0.2 s, the monitor's interval, and the time that the store needs.
ASK_S = 5.0  # seconds that a rank with gradients that are not finite waits for a failure, while the store answers
ASK_EVERY_S = 0.25

KEY = "megatron_ep/failed"
NORM = "get_grad_norm_fp32"  # function of Megatron's modules that reduces a norm of the gradients

log = logging.getLogger(__name__)

_replaced: list[tuple[Any, str, Callable[..., Any]]] = []
_running: set[str] = set()  # names of checked methods that are running, because optimizers contain optimizers
_norms: list[float | torch.Tensor] = []  # norms of the gradients in this step
_publishing: futures.Future[None] | None = None  # the failure of this process
_started = time.time()  # torchrun may keep its store, with older failures, from one attempt of a job to the next
_asks = True  # False after gradients were not finite without a failure, which may repeat in every step
before_step: Callable[[], None] | None = None  # called before each step


@dataclass(frozen=True)
class JobFailure:
    """A failure in the store.

    rank: rank in the default group.
    cause: the first line of the error.
    time: the rank's clock, in seconds since the epoch.
    """

    rank: int
    cause: str
    time: float


def enable() -> None:
    """Makes each step of a `MegatronOptimizer` and each `dist_checkpointing.save` of this process raise before it keeps
    results of a failed call of megatron_ep. Idempotent."""
    if _replaced:
        return
    for kind in _subclasses(MegatronOptimizer):
        for name, before in (("step", _before_step), ("step_with_ready_grads", _check_gradients)):
            if name in vars(kind):
                _replace(kind, name, functools.partial(_checked, name, before))
    for module in [each for name, each in sys.modules.items() if name.startswith("megatron.core.")]:
        if NORM in vars(module):
            _replace(module, NORM, _noted_norm)
    _replace(dist_checkpointing, "save", _checked_save)
    failures.watchers.append(_publish)


def disable() -> None:
    """Restores Megatron's own steps and checkpoints. Idempotent."""
    while _replaced:
        setattr(*_replaced.pop())
    if _publish in failures.watchers:
        failures.watchers.remove(_publish)


def check() -> None:
    """Raises, and publishes the failure, if a call of this process's buffers has failed on any of their ranks. Waits
    for this rank's launches, and for other ranks only as these do.

    Raises EPError as `megatron_ep.raise_if_failed` does.
    """
    try:
        ep.raise_if_failed()
    except Exception as error:
        _publish(f"{error}".partition("\n")[0])
        finish_publishing()
        raise
    if _publishing is not None:
        _withdraw()


def finish_publishing() -> None:
    """Waits until the store has the failure of this process, which may end afterwards; at most for the time for which
    a store may be silent."""
    if _publishing is not None:
        futures.wait([_publishing], STORE_S)


def _checked(name: str, before: Callable[[MegatronOptimizer], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(optimizer: MegatronOptimizer, *args: Any, **kwargs: Any) -> Any:
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if name in _running or is_captured:  # a graph's replays are not checked until the next save
            return method(optimizer, *args, **kwargs)
        before(optimizer)
        _running.add(name)
        try:
            return method(optimizer, *args, **kwargs)
        finally:
            _running.remove(name)

    return checked


def _before_step(_: MegatronOptimizer) -> None:
    check()
    if before_step is not None:
        before_step()
    _norms.clear()


def _checked_save(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return save(*args, **kwargs)

    return checked


def _noted_norm(norm: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(norm)
    def noted(*args: Any, **kwargs: Any) -> Any:
        value = norm(*args, **kwargs)
        _norms.append(value)
        return value

    return noted


def _check_gradients(optimizer: MegatronOptimizer) -> None:
    """Raises if the gradients are not finite because a call of megatron_ep has failed on some rank of the job."""
    global _asks
    if _are_finite(optimizer):
        _asks = True
        return
    waiting = Wait(ASK_S if _asks else 0.0, STORE_S)
    while True:
        failures.raise_if_known_to_have_failed()
        try:
            failure = waiting.answer(functools.partial(_with_store, _read))
        except RuntimeError as error:
            raise ep.EPError(
                f"the gradients are not finite, and it is not known whether a rank of the job failed, so nothing is "
                f"kept of the optimizer's step: {error}"
            ) from error
        if failure is not None:
            raise ep.EPAbortError(
                f"rank {failure.rank} of the job failed before the optimizer's step, of which nothing is kept; its "
                f"error: {codec.readable(failure.cause)}"
            )
        if waiting.is_over:
            break
        time.sleep(ASK_EVERY_S)
    if _asks:
        _asks = False
        log.warning("the gradients are not finite, and no rank tells of a failed call: the model's own values are not")


def _are_finite(optimizer: MegatronOptimizer) -> bool:
    """Returns whether the norm of the gradients is finite, or the gradients are if Megatron computes no norm."""
    values: list[float | torch.Tensor] = _norms
    if not values and (gradients := list(_gradients(optimizer))):
        norms = torch._foreach_norm(gradients, math.inf)
        values = [torch.stack([norm.to(norms[0].device) for norm in norms])]
    for value in values:
        if isinstance(value, torch.Tensor):
            _wait_for_stream(value)
            if not bool(value.isfinite().all()):
                return False
        elif not math.isfinite(value):
            return False
    return True


def _gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each is not optimizer:
            yield from _gradients(each)
        elif not getattr(each, "is_stub_optimizer", False):
            for parameter in each.get_parameters():
                gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "decoupled_grad", None)
                if gradient is not None:
                    yield getattr(gradient, "_local_tensor", gradient)


def _wait_for_stream(value: torch.Tensor) -> None:
    """Waits until a value on the GPU is computed. Raises if a failure becomes known before, because then it may never
    be."""
    if value.device.type != "cuda":
        return
    event = torch.cuda.current_stream(value.device).record_event()
    while not event.query():
        failures.raise_if_known_to_have_failed()
        time.sleep(1e-4)


# ---- the store


def _publish(cause: str) -> None:
    """Writes a failure of this process to the store, in a thread, because the store may not answer."""
    global _publishing
    if _publishing is None and dist.is_initialized() and dist.get_world_size() > 1:
        failure = codec.encode(JobFailure(dist.get_rank(), codec.readable(cause), time.time())).decode()
        store = _get_default_store()
        _publishing = in_thread(lambda: ask(store, lambda connection: write(connection, KEY, failure)))


def _withdraw() -> None:
    """Deletes this rank's failure from the store after the buffers have been reset."""
    global _publishing
    finish_publishing()
    _publishing = None
    own = dist.get_rank()
    with contextlib.suppress(RuntimeError):
        _with_store(lambda store: (failure := _read(store)) and failure.rank == own and store.delete_key(KEY))


def _read(store: dist.Store) -> JobFailure | None:
    data = read(store, KEY)
    if data is None:
        return None
    try:
        failure: JobFailure = codec.decode(data, JobFailure)
    except ValueError as error:
        log.debug("the store of torch.distributed holds a failure that no rank has written: %s", error)
        return None
    return failure if failure.time > _started else None


def _with_store(work: Callable[[dist.Store], T]) -> T | None:
    """Returns the result of `work`; None in a process without other ranks. Raises EPError if the store does not answer,
    and RuntimeError if it is lost."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return ask(_get_default_store(), work)


# ---- Megatron's names


def _replace(owner: Any, name: str, made_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = vars(owner)[name]
    _replaced.append((owner, name, original))
    setattr(owner, name, made_of(original))


def _subclasses(kind: type) -> set[type]:
    return set(kind.__subclasses__()).union(*map(_subclasses, kind.__subclasses__()))
