"""Autograd functions that move rows by a plan, on checked arguments.

Tensors are [rows, elements], one after the other for each rank of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from megatron_ep.normal import launches
from megatron_ep.normal.autograd import in_memory, need_gradient
from megatron_ep.normal.handle import Handle
from megatron_ep.sequences.handles import PlanHandles

Tensors = Sequence[torch.Tensor]


def differentiable_dispatch(handles: PlanHandles, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies `DispatchFunction`, without autograd if no gradient is needed."""
    return (DispatchFunction.apply if need_gradient(tensors) else _dispatch)(handles, *tensors)


def differentiable_move(handle: Handle, back: Handle, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies `MoveFunction`, without autograd if no gradient is needed."""
    return MoveFunction.apply(handle, back, *tensors) if need_gradient(tensors) else _move(handle, *tensors)


def _move(handle: Handle, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with handle.group.abort_peers_on_error():
        return tuple(launches.launch_dispatch(handle, rows, None, None, clears_end=False)[0])


def _dispatch(handles: PlanHandles, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n = len(handles.spare_tokens)
    q = _move(handles.q, *tensors[:n])
    return (*q, *_copy(handles, tensors[n : 2 * n], tensors[2 * n :]))


def _copy(handles: PlanHandles, k: Tensors, v: Tensors = ()) -> tuple[torch.Tensor, ...]:
    """Sends K and V as one row: V takes the place of fp8 scales."""
    with handles.kv.group.abort_peers_on_error():
        k, v = ([_with_spare(handles, i, x) for i, x in enumerate(rows)] for rows in (k, v))
        k_rows, v_rows, _ = launches.launch_dispatch(handles.kv, k, v or None, None, clears_end=False)
    return (*k_rows, *(v_rows or ()))


def _with_spare(handles: PlanHandles, i: int, rows: torch.Tensor) -> torch.Tensor:
    if not handles.spare_tokens[i]:
        return rows
    return torch.cat([rows, *(rows[s.first_row : s.first_row + s.length] for s in handles.spare_tokens[i])])


def _sum(handles: PlanHandles, *copies: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Computes `reference.sum_copies`. Rows that were widened before they were sent are rounded at the end."""
    dtype = copies[0].dtype
    with handles.kv.group.abort_peers_on_error():
        if handles.widens_sums(dtype):
            copies = tuple(rows.float() for rows in copies)
        sums, _ = launches.launch_combine(handles.kv, copies, None)
        return tuple(_add_spare(handles, i, rows).to(dtype) for i, rows in enumerate(sums))


def _add_spare(handles: PlanHandles, i: int, sums: torch.Tensor) -> torch.Tensor:
    spare_tokens = handles.spare_tokens[i]
    if not spare_tokens:
        return sums
    rows, spare = sums.split([spare_tokens[0].first_token, len(sums) - spare_tokens[0].first_token])
    for tokens, part in zip(spare_tokens, spare.split([s.length for s in spare_tokens]), strict=True):
        rows[tokens.first_row : tokens.first_row + tokens.length] += part
    return rows.clone()


class MoveFunction(Function):
    """Moves rows that have one destination each. back: handle of the opposite direction."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, back: Handle, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.back = handle, back
        return _move(handle, *rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.handle.group.abort_peers_on_error():
            return (None, None, *differentiable_move(ctx.back, ctx.handle, *map(in_memory, grads)))


class DispatchFunction(Function):
    """Moves (q, k, v) of each rank to the ranks that compute attention, in one function so that all ranks send its
    gradients in the same order."""

    @staticmethod
    def forward(ctx: Any, handles: PlanHandles, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handles = handles
        out = _dispatch(handles, *tensors)
        ctx.mark_non_differentiable(*(rows for rows in out if rows.dtype == torch.float8_e4m3fn))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handles, n = ctx.handles, len(ctx.handles.spare_tokens)
        q, k, v = (ctx.needs_input_grad[1 + i * n : 1 + (i + 1) * n] for i in range(3))
        with handles.kv.group.abort_peers_on_error():
            grads = tuple(map(in_memory, grads))
            none = (None,) * n
            return (
                None,
                *(differentiable_move(handles.out, handles.q, *grads[:n]) if any(q) else none),
                *(_differentiable_sum(handles, *grads[n : 2 * n]) if any(k) else none),
                *(_differentiable_sum(handles, *grads[2 * n :]) if any(v) else none),
            )


class CopyFunction(Function):
    """Copies K, or V, to all ranks that need it."""

    @staticmethod
    def forward(ctx: Any, handles: PlanHandles, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handles = handles
        return _copy(handles, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.handles.kv.group.abort_peers_on_error():
            return (None, *_differentiable_sum(ctx.handles, *map(in_memory, grads)))


class SumFunction(Function):
    """Sums the copies of each row: the gradient of `CopyFunction`."""

    @staticmethod
    def forward(ctx: Any, handles: PlanHandles, *copies: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handles = handles
        return _sum(handles, *copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.handles.kv.group.abort_peers_on_error():
            rows = tuple(map(in_memory, grads))
            run = CopyFunction.apply if need_gradient(rows) else _copy_alone
            return (None, *run(ctx.handles, *rows))


def _copy_alone(handles: PlanHandles, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _copy(handles, rows)


def _differentiable_sum(handles: PlanHandles, *copies: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (SumFunction.apply if need_gradient(copies) else _sum)(handles, *copies)
