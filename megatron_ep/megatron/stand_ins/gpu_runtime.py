"""Run Megatron-Core on GPUs that ranks may share, with gloo between the ranks.

NCCL refuses two ranks on one GPU. Gloo takes tensors there through the host, and lacks one collective that Megatron
uses. `enable()` makes up for it in this process; `REPLACED` lists what it touches and why.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ep.megatron.stand_ins.host_runtime import optimize_with_torch

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"

REPLACED: dict[str, str] = {
    f"{_BUCKETS}._coalescing_manager": "Megatron merges the all-reduces of its gradient buckets into one, which gloo "
    "offers for host tensors alone; here each is issued by itself. No overlap with the backward pass",
    f"{_MOE_UTILS}.te_general_gemm": "megatron-core 0.16 reads the name in the router's matrix product even where "
    "Transformer Engine is absent and the name undefined; None selects torch's product",
    "Adam and what belongs to it (see host_runtime.REPLACED)": "Transformer Engine's optimizer has another state than "
    "torch's, and a run that began on a host, or on a GPU without it, could not go on",
    "torch._dynamo.config.disable": "Megatron compiles small functions with torch.compile, in every process at start, "
    "and differently for every shape",
}


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
    torch._dynamo.config.disable = True

    importlib.import_module(_BUCKETS)._coalescing_manager = _one_by_one
    moe_utils = importlib.import_module(_MOE_UTILS)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    optimize_with_torch()
