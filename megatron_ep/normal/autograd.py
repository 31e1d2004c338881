"""Autograd functions of dispatch and combine, for arguments that `megatron_ep.normal.checks` has checked.

`tensors` are the rows of each rank of this process, followed by the weights of each, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from megatron_ep import float8
from megatron_ep.normal import cached_plans
from megatron_ep.normal.handle import Handle

Run = Callable[..., tuple[torch.Tensor, ...]]  # cached_plans a call of tensors


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor without torch's negative bit, because kernels read its memory."""
    return tensor.resolve_neg().contiguous()


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


def differentiable_dispatch(
    handle: Handle, *tensors: torch.Tensor, fp8: tuple[str, torch.dtype] | None = None
) -> tuple[torch.Tensor, ...]:
    """Applies `DispatchFunction` if a gradient is needed; otherwise calls directly, which is faster in torch.

    fp8: the last arguments of `float8.quantize`, by whose results the rows are sent.
    """
    n = len(handle.ranks)
    values, scales = (None, None) if fp8 is None else quantized(tensors[:n], *fp8)
    plan = cached_plans.dispatch_plan(
        handle, as_sent(values or tensors[:n]), scales, tensors[n:] or None, clears_end=True
    )
    run = sends(plan, handle, scales, values)
    return DispatchFunction.apply(handle, run, *tensors) if need_gradient(tensors) else run(*tensors)


def quantized(xs: Sequence[torch.Tensor], scales: str, dtype: torch.dtype) -> Sequence[list[torch.Tensor]]:
    """Returns the lists of values and of scales of each rank's rows."""
    return [list(part) for part in zip(*(float8.quantize(x, scales, dtype) for x in xs), strict=True)]


def as_sent(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns rows in a type that travels: float8_e5m2, which nobody calculates with on the way, as float8_e4m3fn."""
    return [x.view(torch.float8_e4m3fn) if x.dtype == torch.float8_e5m2 else x for x in rows]


def differentiable_combine(handle: Handle, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies `CombineFunction` if a gradient is needed; otherwise calls directly."""
    n = len(handle.ranks)
    run = sums(cached_plans.combine_plan(handle, tensors[:n], tensors[n:] or None, None), handle)
    return CombineFunction.apply(handle, run, None, *tensors) if need_gradient(tensors) else run(*tensors)


def gradient_of_rows(x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of x [..., H], which was multiplied by weights [...] before a combine.

    grad: [..., H], gradient of the products.
    is_row: bool [...], False for padding, where x and weights are undefined.
    """
    return (grad * torch.where(is_row, weights, weights.new_zeros(())).unsqueeze(-1)).to(x.dtype)


def gradient_of_weights(
    x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, is_row: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of weights [...], see `gradient_of_rows`."""
    products = grad.to(weights.dtype) * x
    return torch.where(is_row, products.sum(dim=-1), weights.new_zeros(()))


def sends(
    plan: Any, handle: Handle, scales: Sequence[torch.Tensor] | None, values: list[torch.Tensor] | None = None
) -> Run:
    """Returns a function that dispatches (x, weights) per rank by a plan to (rows, probs, scales) per rank.

    values: x as fp8, with these scales: sent in place of x, and received as rows of x's dtype.
    """

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = handle.group
        n = len(group.ranks)
        with group.abort_peers_on_error():
            sent = as_sent(values) if values else tensors[:n]
            parts = plan.run(handle, group.live_backend(), sent, scales, tensors[n:] or None)
            rows, out_scales, probs = zip(*parts, strict=True)
            if values:
                arrived = [x.view(values[0].dtype) for x in rows]
                rows = tuple(map(float8.dequantize, arrived, out_scales, [x.dtype for x in tensors[:n]]))
        return (*rows, *(probs if tensors[n:] else ()), *(out_scales if scales and not values else ()))

    return run


def sums(plan: Any, handle: Handle, *, is_weighted: bool = False) -> Run:
    """Returns a function that combines (rows, weights) per rank by a plan. is_weighted: weights only multiply rows."""

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = len(handle.ranks)
        x, weights = tensors[:n], tensors[n:] or None
        with handle.group.abort_peers_on_error():
            backend = handle.group.live_backend()
            parts = plan.run(handle, backend, x, *((None, weights) if is_weighted else (weights, None)))
        out, out_weights = zip(*parts, strict=True)
        return out if weights is None or is_weighted else out + out_weights

    return run


class DispatchFunction(Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.row, n = handle, (tensors[0].shape[1], tensors[0].dtype), len(handle.group.ranks)
        ctx.weight_dtype = tensors[-1].dtype
        ctx.set_materialize_grads(False)
        out = run(*tensors)
        if tensors[0].dtype == torch.float8_e4m3fn:
            ctx.mark_non_differentiable(*out[:n], *out[len(tensors) :])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        n, handle, (hidden, dtype) = len(ctx.handle.ranks), ctx.handle, ctx.row
        is_float8 = dtype == torch.float8_e4m3fn
        # All ranks must decide alike: requires_grad of weights is equal on all, but use in the loss may not be.
        sends_weights = any(ctx.needs_input_grad[2 + n :])
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
            back = differentiable_combine(handle, *rows, *weights)
        of_x = (None,) * n if is_float8 else back[:n]
        of_weights = back[n:] or (None,) * (len(ctx.needs_input_grad) - 2 - n)
        return (None, None, *of_x, *of_weights)


def _given(grad: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, handle: Handle) -> torch.Tensor:
    """Returns the gradient in contiguous memory; zeros if the output was not used in the loss."""
    return torch.zeros(shape, dtype=dtype, device=handle.group.device) if grad is None else in_memory(grad)


class CombineFunction(Function):
    """dtype: of the rows in which gradients are sent, with scales that are powers of two; None: as they are."""

    @staticmethod
    def forward(
        ctx: Any, handle: Handle, run: Run, dtype: torch.dtype | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.fp8 = handle, None if dtype is None else ("pow2", dtype)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.handle.group.abort_peers_on_error("combine"):
            back = differentiable_dispatch(ctx.handle, *map(in_memory, grads), fp8=ctx.fp8)
            return (None, None, None, *back)


class WeightedCombineFunction(Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle = handle
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n, handle = len(ctx.handle.ranks), ctx.handle
        x_grads: list[torch.Tensor | None] = [None] * n
        weight_grads: list[torch.Tensor | None] = [None] * n
        with handle.group.abort_peers_on_error("combine"):
            saved = ctx.saved_tensors  # read only once, because a checkpoint unpacks them each time
            x, weights = saved[:n], saved[n:]
            marks = [row_marks(grad, handle.topk) for grad in grads]
            back = differentiable_dispatch(handle, *map(in_memory, grads), *marks)
            rows = back[:n]
            is_row = [(mark != 0).any(dim=1) if handle.is_flat else mark != 0 for mark in back[n:]]
            for i in range(n):
                given = (x[i], weights[i], rows[i], is_row[i])
                if ctx.needs_input_grad[2 + i]:
                    x_grads[i] = gradient_of_rows(*given)
                if ctx.needs_input_grad[2 + n + i]:
                    weight_grads[i] = gradient_of_weights(*given)
        return (None, None, *x_grads, *weight_grads)
