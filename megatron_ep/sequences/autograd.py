"""Autograd functions that move rows by a plan, on checked arguments.

Tensors are [rows, elements], one after the other for each rank of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import Function

from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.normal import cached_plans
from megatron_ep.normal.autograd import in_memory, need_gradient
from megatron_ep.normal.handle import Handle
from megatron_ep.sequences.handles import PlanHandles

Map = Callable[..., tuple[torch.Tensor, ...]]


def differentiable_dispatch(handles: PlanHandles, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies `DispatchFunction`, without autograd if no gradient is needed."""
    return (DispatchFunction.apply if need_gradient(tensors) else _dispatch)(handles, *tensors)


def differentiable_move(handle: Handle, back: Handle, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Moves rows that have one destination each. back: handle of the opposite direction."""
    return _apply(handle.group, partial(_move, handle), partial(_move, back), *rows)


def _differentiable_sum(handles: PlanHandles, *copies: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _apply(handles.kv.group, partial(_sum, handles), partial(_copy, handles), *copies)


def _move(handle: Handle, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with handle.group.abort_peers_on_error():
        return tuple(cached_plans.launch_dispatch(handle, rows, None, None, clears_end=False)[0])


def _dispatch(handles: PlanHandles, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n = len(handles.spare_tokens)
    return (*_move(handles.q, *tensors[:n]), *_copy(handles, *tensors[n:]))


def _copy(handles: PlanHandles, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sends the rows of K, and behind them those of V if they are given, to all ranks that need them. Both travel as
    one row: V takes the place of fp8 scales."""
    n = len(handles.spare_tokens)
    with handles.kv.group.abort_peers_on_error():
        k, v = ([_with_spare(handles, i, x) for i, x in enumerate(part)] for part in (rows[:n], rows[n:]))
        k_rows, v_rows, _ = cached_plans.launch_dispatch(handles.kv, k, v or None, None, clears_end=False)
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
        sums, _ = cached_plans.launch_combine(handles.kv, copies, None)
        return tuple(_add_spare(handles, i, rows).to(dtype) for i, rows in enumerate(sums))


def _add_spare(handles: PlanHandles, i: int, sums: torch.Tensor) -> torch.Tensor:
    spare_tokens = handles.spare_tokens[i]
    if not spare_tokens:
        return sums
    rows, spare = sums.split([spare_tokens[0].first_token, len(sums) - spare_tokens[0].first_token])
    for tokens, part in zip(spare_tokens, spare.split([s.length for s in spare_tokens]), strict=True):
        rows[tokens.first_row : tokens.first_row + tokens.length] += part
    return rows.clone()


def _apply(group: RankGroup, there: Map, back: Map, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies `LinearFunction`, without autograd if no gradient is needed."""
    return LinearFunction.apply(group, there, back, *rows) if need_gradient(rows) else there(*rows)


class LinearFunction(Function):
    """Applies a linear map of rows, whose gradients take the opposite way: `there` moves rows and `back` returns them,
    or one sums copies and the other makes them. The backward pass is differentiable, too."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, there: Map, back: Map, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.there, ctx.back = group, there, back
        return there(*rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.group.abort_peers_on_error():
            return (None, None, None, *_apply(ctx.group, ctx.back, ctx.there, *map(in_memory, grads)))


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
