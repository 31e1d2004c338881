"""Run Megatron-Core on a machine with no GPU.

Megatron-Core computes on any device but asks for CUDA by name in a few dozen places. `enable()` answers those
requests with the host, for this process. It is opt-in, `REPLACED` lists everything it touches and why, and nothing of
Megatron's arithmetic, dispatchers, schedules or optimizers is replaced.
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
_RNG = "megatron.core.tensor_parallel.random"
_OPTIMIZER = "megatron.core.optimizer"

REPLACED: dict[str, str] = {
    "torch." + ", ".join(FACTORIES): "optimizers, gradient clipping, schedules and the auxiliary-loss tracker allocate "
    "with device='cuda', context parallelism in pinned memory; the host allocates instead, and pins nothing",
    "torch.Tensor.cuda, to": "the same for tensors that are moved, and so for torch.nn.Module.cuda and to",
    "torch.Tensor.type without arguments": "the optimizers and gradient clipping recognise gradients by the name "
    "'torch.cuda.FloatTensor'; host tensors answer with that name",
    "torch.cuda.current_device": "Megatron passes it as device=; the host is that device",
    "torch.cuda.Stream, Event, stream, current_stream, default_stream, synchronize": "the all-to-all dispatcher and "
    "overlapped shared experts order copies with streams; the host runs everything in program order",
    "torch.cuda.manual_seed, get_rng_state": "the random-state tracker seeds the CUDA generator; on the host the "
    "layers draw from the CPU generator",
    f"{_RNG}._get_cuda_rng_state, _set_cuda_rng_state": "the tracker forks the CUDA generator (weights, dropout, "
    "recompute); the CPU generator is forked instead",
    f"{_RNG} (log filter)": "the tracker warns when the CPU generator moves inside a fork; here it is meant to",
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": "the router's matrix product is Transformer "
    "Engine's where it is installed, and megatron-core 0.16 reads the name even where it is not; None selects torch's",
    "maybe_move_tensor_to_cpu (moe_utils, token_dispatcher)": "it converts split sizes to lists or numpy arrays only "
    "for CUDA tensors; host tensors are converted too",
    f"{_OPTIMIZER} (it, distrib_optimizer, optimizer and clip_grads): Adam, SGD, multi_tensor_applier, l2_norm_impl, "
    "multi_tensor_scale_impl, multi_tensor_scale_tensor_impl, USING_PYTORCH_OPTIMIZER, USING_TE_OPTIMIZER, "
    "USING_APEX_OPTIMIZER, HAVE_APEX_OR_TE": "where Transformer Engine or Apex is installed they name its kernels, for "
    "GPUs alone; they become what Megatron takes where neither is",
    "TORCHDYNAMO_DISABLE": "Megatron compiles small fusions with torch.compile, which takes seconds at start and gains "
    "nothing on the host",
}


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
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


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


def _set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _expects_rng_to_move(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def optimize_with_torch() -> None:
    """Megatron's optimizers become those that it takes where neither Transformer Engine nor Apex is installed."""
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
        found = importlib.import_module(_OPTIMIZER + module)
        for name, value in names.items():
            if hasattr(found, name):
                setattr(found, name, value)


_enabled = False


def enable() -> None:
    """Makes this process's Megatron-Core run on the host. Idempotent; lasts until the process ends.

    Call it before building a model.

    Raises RuntimeError if CUDA is already initialised in this process, so that something here uses a real GPU.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("host_runtime.enable(): CUDA is already initialised in this process; run it in a fresh one")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True  # when torch._dynamo was imported before the variable was set

    for name, value in {
        "current_device": lambda: _HOST,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: _STREAM,
        "default_stream": lambda *_: _STREAM,
        "synchronize": lambda *_: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": _get_rng_state,
    }.items():
        setattr(torch.cuda, name, value)
    for name in FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    torch.Tensor.to = _on_host(torch.Tensor.to)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)

    rng = importlib.import_module(_RNG)
    rng._get_cuda_rng_state, rng._set_cuda_rng_state = _get_rng_state, _set_rng_state
    logging.getLogger(_RNG).addFilter(_expects_rng_to_move)

    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    token_dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    moe_utils.te_general_gemm = None
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    optimize_with_torch()
    _enabled = True
