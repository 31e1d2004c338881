"""Run Megatron-LM's training scripts on a machine with no GPU.

`host_runtime` lets Megatron-Core compute there; the scripts' own loop (`megatron.training`) asks for CUDA in further
places and builds CUDA extensions. `enable()` answers those too, for this process. Opt-in.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.util
import multiprocessing
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from megatron_ep.megatron.stand_ins import host_runtime
from megatron_ep.megatron.stand_ins.host_runtime import replace

_HELPERS = "megatron.core.datasets.helpers_cpp"
_KERNELS = "megatron.legacy.fused_kernels"
_INVARIANT = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


@functools.cache
def enable() -> None:
    """Makes this process run a training script on the host. Idempotent; lasts until the process ends.

    Call it before the script starts, its directory in sys.path. Its model must ask for nothing that only a GPU has:
    `--transformer-impl local`, `--use-cpu-initialization` and no fusions.

    Raises RuntimeError if CUDA is already initialised in this process.
    """
    host_runtime.enable()
    # The scripts refuse to start without a device, and validate arguments by its generation: the host is one Hopper GPU
    # for each rank. They empty and ask the caching allocator for every log line: it holds 0 bytes.
    zero = dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), lambda *_: 0
    )
    replace(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: 1,
        set_device=lambda _: None,
        get_device_capability=lambda *_: (9, 0),
        get_device_properties=lambda *_: types.SimpleNamespace(name="host", major=9, minor=0, total_memory=0),
        empty_cache=lambda: None,
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        memory_stats=lambda *_: collections.defaultdict(int),
        mem_get_info=lambda *_: (0, 0),
        reset_peak_memory_stats=lambda *_: None,
        **zero,
    )
    # The schedule of 1F1B overlap names its steps for a profiler of GPUs.
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    # torch's optimizers ask the device that is_available promises whether it captures a graph.
    torch.accelerator.current_accelerator = lambda *_, **__: None
    # Memory is handed between streams and pinned for copies to a GPU: the host has one stream and copies nothing.
    replace(
        torch.Tensor, record_stream=lambda *_: None, pin_memory=lambda tensor, *_: tensor, is_pinned=lambda *_: False
    )
    # They ask for the backend nccl: gloo connects hosts.
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, _over_gloo(getattr(torch.distributed, name)))
    # A pipeline stage frees what it has begun to send, which is in order on a CUDA stream. Gloo may not have read it
    # yet, so it sends a copy.
    send = functools.partial(_send_copy, torch.distributed.isend)
    torch.distributed.isend = torch.distributed.distributed_c10d.isend = send
    # Checkpoints are written with the help of spawned processes, which import the script again, without these answers:
    # they are forked.
    for module in (multiprocessing, torch.multiprocessing):
        module.get_context = _forking(module.get_context)
    # The index builder is compiled into the source tree at start, and by 0.16 CUDA kernels that are not called here.
    take_installed_helpers()
    sys.modules[_KERNELS] = _module(_KERNELS, load=lambda _: None)
    # torch's norms refuse sequence parallelism only because nobody marks their weights for the reduction of their
    # gradients over the tensor-parallel ranks: here they are marked.
    _mark_norms()
    # Megatron-LM 0.16 imports it, and so Triton, at start for a mode of inference.
    if importlib.util.find_spec("triton") is None:
        sys.modules[_INVARIANT] = _module(_INVARIANT, enable_batch_invariant_mode=_refuse)


def _module(name: str, **functions: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(functions)
    return module


def _refuse() -> None:
    raise RuntimeError("--batch-invariant-mode needs Triton, which is not installed")


def _over_gloo(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return make(*args, **kwargs)

    return made


def _send_copy(isend: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return isend(tensor.clone(), *args, **kwargs)


def _forking(get_context: Any) -> Any:
    return lambda method=None: get_context("fork" if method == "spawn" else method)


def take_installed_helpers() -> None:
    """The index builder of an installed megatron-core, if sys.path has one, in place of compiling the tree's own."""
    found = [
        file
        for path in sys.path
        for file in sorted(Path(path or ".", "megatron", "core", "datasets").glob("helpers_cpp.*.so"))
    ]
    if found:
        spec = importlib.util.spec_from_file_location(_HELPERS, found[0])
        assert spec is not None and spec.loader is not None, f"{found[0]} is no extension of this Python"
        sys.modules[_HELPERS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_HELPERS])
        importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None


def _mark_norms() -> None:
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    make = norm.__new__

    def marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            module = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for parameter in module.parameters():
            parameter.sequence_parallel = parallel
        return module

    norm.__new__ = staticmethod(marked)
