"""Keeps optimizer states that a distributed optimizer saved in the order of its memory from experts of another kind.

Grouped experts have the numbers of Megatron's experts in another order, and as many of them, so that Megatron would
load states of the one into the other, and mix up the experts. Two of its formats are in the order of memory:
"dp_reshardable", the default of torch_dist, and that of torch. The same kind of experts continues them. The format of
--dist-ckpt-optim-fully-reshardable is by parameter, and fits both.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

IS_GROUPED = "has_grouped_experts"  # an attribute of parameters
NOTE = "grouped experts; others continue states of --dist-ckpt-optim-fully-reshardable alone"
WRONG = (
    "optimizer states were saved with {saved} experts in the order of their memory, and this run has {own} experts: "
    "save them with --dist-ckpt-optim-fully-reshardable, or continue with --no-load-optim"
)


@functools.cache
def guard() -> None:
    """Makes distributed optimizers built from now on note in these formats whether they have grouped experts, so that
    Megatron refuses the states for others, also in processes without this project. Idempotent."""
    for name, wrapped in (
        ("__init__", _noted),
        ("get_parameter_state_dp_zero", _with_noted_sizes),
        ("load_parameter_state_from_dp_zero", _without_noted_sizes),
        ("load_parameter_state_from_dp_reshardable", _checked),
    ):
        setattr(DistributedOptimizer, name, functools.partialmethod(wrapped, getattr(DistributedOptimizer, name)))


def _grouped_buffers(optimizer: Any) -> list[int]:
    """Returns the indices of an optimizer's buffers that have weights of grouped experts."""
    buffers = enumerate(getattr(optimizer, "buffers", ()))
    return [i for i, buffer in buffers if any(hasattr(parameter, IS_GROUPED) for parameter in buffer.params)]


def _noted(optimizer: Any, init: Any, *args: Any, **options: Any) -> None:
    init(optimizer, *args, **options)
    if _grouped_buffers(optimizer):
        optimizer.per_bucket_numel_unpadded.append({NOTE: []})  # Megatron saves this list, and compares it


def _checked(optimizer: Any, load: Any, state: Any) -> Any:
    saved = (state or {}).get("per_bucket_numel_unpadded")
    if saved is not None:
        _check(any(NOTE in sizes for sizes in saved), bool(_grouped_buffers(optimizer)))
    return load(optimizer, state)


def _with_noted_sizes(optimizer: Any, get: Any, *args: Any, **options: Any) -> Any:
    state = get(optimizer, *args, **options)
    for i in _grouped_buffers(optimizer) if state is not None else ():
        for tensors in state[i].values():
            if "numel_unpadded" in tensors:  # Megatron compares it with a number
                tensors["numel_unpadded"] = (tensors["numel_unpadded"], NOTE)
    return state


def _without_noted_sizes(optimizer: Any, load: Any, state: Any, *args: Any, **options: Any) -> Any:
    grouped = _grouped_buffers(optimizer)
    for i, of_buffer in (state or {}).items():
        for tensors in of_buffer.values() if isinstance(i, int) else ():
            size = tensors.get("numel_unpadded")
            if size is not None:
                _check(isinstance(size, tuple), i in grouped)
                tensors["numel_unpadded"] = size[0] if isinstance(size, tuple) else size
    return load(optimizer, state, *args, **options)


def _check(saved_grouped: bool, own_grouped: bool) -> None:
    if saved_grouped != own_grouped:
        kinds = {True: "grouped", False: "Megatron's"}
        raise ValueError(WRONG.format(saved=kinds[saved_grouped], own=kinds[own_grouped]))
