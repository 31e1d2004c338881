"""Run Megatron-Core on GPUs that ranks may share, with gloo between the ranks.

NCCL refuses two ranks on one GPU. Gloo takes tensors there through the host, and lacks one collective that Megatron
uses. `enable()` makes up for it in this process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ep.megatron.stand_ins.host_runtime import optimize_with_torch


@contextlib.contextmanager
def _one_by_one(*_: Any, async_ops: bool = False, **__: Any) -> Iterator[None]:
    assert not async_ops, "the recipe allows no overlapped reduction on a GPU"
    yield


def enable() -> None:
    """Gives this process its GPU, LOCAL_RANK modulo the number of GPUs, and makes what it computes reproducible.

    An operation of torch that has no deterministic kernel raises RuntimeError from now on. Call it before anything
    computes on a GPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ["RANK"])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS chooses its algorithms by what is free
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
    # Megatron compiles small functions in every process at start, and differently for every shape.
    torch._dynamo.config.disable = True
    # Megatron merges the all-reduces of its gradient buckets into one, which gloo offers for host tensors alone: here
    # each is issued by itself, and does not overlap with the backward pass.
    importlib.import_module("megatron.core.distributed.param_and_grad_buffer")._coalescing_manager = _one_by_one
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16 reads it even without Transformer Engine
        moe_utils.te_general_gemm = None
    # Transformer Engine's optimizer has another state than torch's: a run that began on a host could not continue.
    optimize_with_torch()
