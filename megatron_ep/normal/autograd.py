"""Autograd functions of dispatch and combine, for arguments that `megatron_ep.normal.api` has checked.

`tensors` are the rows of each rank of this process, followed by the weights of each, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from megatron_ep import float8
from megatron_ep.buffer.interface import Backend
from megatron_ep.normal import launches
from megatron_ep.normal.handle import Handle
from megatron_ep.normal.plan import run_plan

Run = Callable[..., tuple[torch.Tensor, ...]]  # launches a call of tensors


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor without torch's negative bit, because kernels read its memory."""
    return tensor.resolve_neg().contiguous()


def empty_rows(grad: torch.Tensor) -> torch.Tensor:
    """Returns [R, 0] in place of gradients [R, H] of float8 rows: x gets none, so that only weights are sent."""
    return grad.new_empty(grad.shape[0], 0, dtype=torch.float32)


def row_marks(grad: torch.Tensor, topk: int) -> torch.Tensor:
    """Returns ones that are sent with the gradients of tokens, to distinguish rows of tokens from padding, in which
    the rows passed to combine are undefined. They arrive as NaN, not 0, if the call failed."""
    return grad.new_ones(grad.shape[0], topk, dtype=torch.float32)


def need_gradient(*lists: Sequence[torch.Tensor] | None) -> bool:
    """Returns whether any tensor of these lists requires a gradient."""
    if torch.is_grad_enabled():
        for tensors in lists:
            for tensor in tensors or ():
                if tensor.requires_grad:
                    return True
    return False


def differentiable_dispatch(handle: Handle, num_ranks: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies `DispatchFunction` if a gradient is needed; otherwise calls directly, which is faster in torch."""
    run = sends(handle, num_ranks, None)
    return DispatchFunction.apply(handle, num_ranks, run, *tensors) if need_gradient(tensors) else run(*tensors)


def differentiable_combine(handle: Handle, num_ranks: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies `CombineFunction` if a gradient is needed; otherwise calls directly."""
    run = sums(handle, num_ranks)
    return CombineFunction.apply(handle, num_ranks, run, *tensors) if need_gradient(tensors) else run(*tensors)


def sends(
    handle: Handle,
    num_ranks: int,
    scales: list[torch.Tensor] | None,
    values: list[torch.Tensor] | None = None,
    *,
    clears_end: bool = True,
) -> Run:
    """Returns a function that dispatches (x, weights) per rank to (rows, probs, scales) per rank.

    values: x as fp8, with these scales: sent in place of x, and received as rows of x's dtype.
    """

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weights = tensors[:num_ranks], tensors[num_ranks:] or None
        with handle.group.abort_peers_on_error():
            rows, out_scales, probs = launches.launch_dispatch(
                handle, values or x, scales, weights, clears_end=clears_end
            )
            if values and out_scales:
                rows = [float8.dequantize(*parts, x[0].dtype) for parts in zip(rows, out_scales, strict=True)]
                out_scales = None
        return (*rows, *(probs or ()), *(out_scales or ()))

    return run


def sums(handle: Handle, num_ranks: int, *, is_weighted: bool = False) -> Run:
    """Returns a function that combines (rows, weights) per rank. is_weighted: weights only multiply rows."""

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weights = tensors[:num_ranks], tensors[num_ranks:] or None
        sent_weights, row_weights = (None, weights) if is_weighted else (weights, None)
        with handle.group.abort_peers_on_error():
            out, out_weights = launches.launch_combine(handle, x, sent_weights, row_weights)
        return (*out, *(out_weights or ()))

    return run


def sends_by_plan(
    plan: Any, handle: Handle, backend: Backend, ids: torch.Tensor | None, scales: torch.Tensor | None
) -> Run:
    """Returns a function that dispatches one rank's (x, weights) by a cached plan to (rows, probs, scales)."""

    def run(x: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        rows, out_scales, probs = run_plan(plan, handle, backend, ids, x, scales, weights)
        if out_scales is None:
            return (rows,) if probs is None else (rows, probs)
        return (rows, out_scales) if probs is None else (rows, probs, out_scales)

    return run


def sums_by_plan(plan: Any, handle: Handle, backend: Backend) -> Run:
    """Returns a function that combines one rank's rows, multiplied by weights if there are any, by a cached plan."""
    return lambda x, row_weights=None: run_plan(plan, handle, backend, x, None, row_weights)[:1]


class DispatchFunction(Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, num_ranks: int, run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.num_ranks, ctx.row = handle, num_ranks, (tensors[0].shape[1], tensors[0].dtype)
        ctx.weight_dtype = tensors[-1].dtype
        ctx.set_materialize_grads(False)
        out = run(*tensors)
        if tensors[0].dtype == torch.float8_e4m3fn:
            ctx.mark_non_differentiable(*out[:num_ranks], *out[len(tensors) :])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        n, handle, (hidden, dtype) = ctx.num_ranks, ctx.handle, ctx.row
        is_float8 = dtype == torch.float8_e4m3fn
        # All ranks must decide alike: requires_grad of weights is equal on all, but use in the loss may not be.
        sends_weights = any(ctx.needs_input_grad[3 + n :])
        with handle.group.abort_peers_on_error("dispatch"):
            rows, weights = [], []
            for i, rank in enumerate(handle.ranks):
                if is_float8:  # float8 rows get no gradient, so that only weights are sent
                    rows.append(torch.empty(rank.rows, 0, dtype=torch.float32, device=handle.group.device))
                else:
                    rows.append(_given(grads[i], (rank.rows, hidden), dtype, handle))
                if sends_weights:
                    shape = (rank.rows, handle.topk) if handle.is_flat else (rank.rows,)
                    weights.append(_given(grads[n + i], shape, ctx.weight_dtype, handle))
            back = differentiable_combine(handle, n, *rows, *weights)
        of_x = (None,) * n if is_float8 else back[:n]
        of_weights = back[n:] or (None,) * (len(ctx.needs_input_grad) - 3 - n)
        return (None, None, None, *of_x, *of_weights)


def _given(grad: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, handle: Handle) -> torch.Tensor:
    """Returns the gradient in contiguous memory; zeros if the output was not used in the loss."""
    return torch.zeros(shape, dtype=dtype, device=handle.group.device) if grad is None else in_memory(grad)


class CombineFunction(Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, num_ranks: int, run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.num_ranks = handle, num_ranks
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.handle.group.abort_peers_on_error("combine"):
            back = differentiable_dispatch(ctx.handle, ctx.num_ranks, *(in_memory(grad) for grad in grads))
        return (None, None, None, *back)


class WeightedCombineFunction(Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, num_ranks: int, run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.num_ranks = handle, num_ranks
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n, handle = ctx.num_ranks, ctx.handle
        x_grads: list[torch.Tensor | None] = [None] * n
        weight_grads: list[torch.Tensor | None] = [None] * n
        with handle.group.abort_peers_on_error("combine"):
            saved = ctx.saved_tensors  # read only once, because a checkpoint unpacks them each time
            x, weights = saved[:n], saved[n:]
            marks = [row_marks(grad, handle.topk) for grad in grads]
            back = differentiable_dispatch(handle, n, *(in_memory(grad) for grad in grads), *marks)
            rows = back[:n]
            is_row = [(mark != 0).any(dim=1) if handle.is_flat else mark != 0 for mark in back[n:]]
            for i in range(n):
                given = (x[i], weights[i], rows[i], is_row[i])
                if ctx.needs_input_grad[3 + i]:
                    x_grads[i] = launches.gradient_of_rows(*given)
                if ctx.needs_input_grad[3 + n + i]:
                    weight_grads[i] = launches.gradient_of_weights(*given)
        return (None, None, None, *x_grads, *weight_grads)
