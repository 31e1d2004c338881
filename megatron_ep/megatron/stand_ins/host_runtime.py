"""Run Megatron-Core on a machine with no GPU.

Megatron-Core computes on any device but asks for CUDA by name in a few dozen places. `enable()` answers those
requests with the host, for this process. It is opt-in, and replaces nothing of Megatron's arithmetic, dispatchers,
schedules or optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: _Stream) -> None: ...
    def wait_event(self, _: _Event) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    """An event that has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, *_: Any) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._at - self._at)

    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


_STREAM = _Stream()
_HOST = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _on_host(call: Callable) -> Callable:
    """`call`, with a device of 'cuda' among its arguments taken for the host, and memory that is not pinned for one."""

    @functools.wraps(call)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _HOST
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return call(*(_HOST if _is_cuda(value) else value for value in args), **kwargs)

    return on_host


def _named_as_on_cuda(type_of: Callable) -> Callable:
    @functools.wraps(type_of)
    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return named


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def replace(owner: Any, **values: Any) -> None:
    """Sets attributes of a module or class."""
    for name, value in values.items():
        setattr(owner, name, value)


def optimize_with_torch() -> None:
    """Makes Megatron's optimizers those that it takes where neither Transformer Engine nor Apex is installed, whose
    kernels are for GPUs alone."""
    utils = importlib.import_module("megatron.core.utils")
    many = {"multi_tensor_applier": utils.local_multi_tensor_applier}
    many |= {"multi_tensor_scale_impl": utils.local_multi_tensor_scale, "multi_tensor_scale_tensor_impl": None}
    for module, names in {
        "": {"Adam": torch.optim.AdamW, "SGD": torch.optim.SGD, "USING_PYTORCH_OPTIMIZER": True},
        ".distrib_optimizer": {"Adam": torch.optim.Adam, "HAVE_APEX_OR_TE": False, "USING_TE_OPTIMIZER": False}
        | {"USING_APEX_OPTIMIZER": False},
        ".optimizer": many,
        ".clip_grads": many | {"l2_norm_impl": utils.local_multi_tensor_l2_norm},
    }.items():
        found = importlib.import_module("megatron.core.optimizer" + module)
        replace(found, **{name: value for name, value in names.items() if hasattr(found, name)})


@functools.cache
def enable() -> None:
    """Makes this process's Megatron-Core run on the host. Idempotent; lasts until the process ends.

    Call it before building a model.

    Raises RuntimeError if CUDA is already initialised in this process, so that something here uses a real GPU.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("host_runtime.enable(): CUDA is already initialised in this process; run it in a fresh one")
    # Megatron compiles small fusions with torch.compile, which takes seconds at start and gains nothing on the host.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True  # torch._dynamo may have been imported before the variable was set

    # Optimizers, schedules and the auxiliary-loss tracker allocate with device="cuda", context parallelism in pinned
    # memory: the host allocates, and pins nothing. What is moved to a GPU stays where it is.
    replace(torch, **{name: _on_host(getattr(torch, name)) for name in FACTORIES})
    replace(torch.Tensor, to=_on_host(torch.Tensor.to), cuda=lambda tensor, *_, **__: tensor)
    # Optimizers and gradient clipping recognise gradients by the name "torch.cuda.FloatTensor".
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)
    # Streams order the copies of the all-to-all dispatcher and of overlapped shared experts: the host runs everything
    # in program order.
    replace(
        torch.cuda,
        current_device=lambda: _HOST,
        Stream=_Stream,
        Event=_Event,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda *_: _STREAM,
        default_stream=lambda *_: _STREAM,
        synchronize=lambda *_: None,
    )
    # The tracker of random states seeds and forks the CUDA generator (weights, dropout, recompute): the CPU's takes its
    # place. It warns if that one moves inside a fork, where it is meant to here.
    tracker = "megatron.core.tensor_parallel.random"
    replace(torch.cuda, manual_seed=torch.manual_seed, get_rng_state=_get_rng_state)
    replace(
        importlib.import_module(tracker),
        _get_cuda_rng_state=_get_rng_state,
        _set_cuda_rng_state=lambda new_state, *_, **__: torch.set_rng_state(new_state),
    )
    logging.getLogger(tracker).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())

    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    token_dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    # The router's matrix product is Transformer Engine's where that is installed, and megatron-core 0.16 reads the name
    # even where it is not. None selects torch's.
    moe_utils.te_general_gemm = None
    # Split sizes become lists or arrays only if they are CUDA tensors.
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    optimize_with_torch()
