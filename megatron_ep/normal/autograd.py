"""Autograd functions of dispatch and combine, on checked arguments: see `megatron_ep.normal.api`.

Tensors are the rows of each rank of this process, followed by the weights of each, if any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from megatron_ep import float8
from megatron_ep.normal import launches
from megatron_ep.normal.handle import Handle


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor without torch's negative bit, because kernels read its memory."""
    return tensor.resolve_neg().contiguous()


def empty_rows(grad: torch.Tensor) -> torch.Tensor:
    """Rows without elements, for as many rows: those of float8 get no gradient, and only their weights travel."""
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
    return (DispatchFunction.apply if need_gradient(tensors) else _dispatch)(handle, num_ranks, None, *tensors)


def differentiable_combine(handle: Handle, num_ranks: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies `CombineFunction` if a gradient is needed; otherwise calls directly."""
    return (CombineFunction.apply if need_gradient(tensors) else _combine)(handle, num_ranks, *tensors)


def _dispatch(
    handle: Handle, num_ranks: int, scales: list[torch.Tensor] | None, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    x, weights = tensors[:num_ranks], tensors[num_ranks:]
    with handle.group.abort_peers_on_error():
        out, out_scales, out_weights = launches.launch_dispatch(handle, x, scales, weights or None, clears_end=True)
    return (*out, *(out_weights or ()), *(out_scales or ()))


def _combine(handle: Handle, num_ranks: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with handle.group.abort_peers_on_error():
        out, out_weights = launches.launch_combine(handle, tensors[:num_ranks], tensors[num_ranks:] or None)
    return (*out, *(out_weights or ()))


class DispatchFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        handle: Handle,
        num_ranks: int,
        scales: list[torch.Tensor] | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.num_ranks, ctx.is_float8 = handle, num_ranks, tensors[0].dtype == torch.float8_e4m3fn
        out = _dispatch(handle, num_ranks, scales, *tensors)
        without_gradient = out[:num_ranks] if ctx.is_float8 else ()
        ctx.mark_non_differentiable(*without_gradient, *(out[-num_ranks:] if scales else ()))  # the last call counts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n = ctx.num_ranks
        has_weights = len(ctx.needs_input_grad) > 3 + n
        grads = grads[: 2 * n if has_weights else n]
        with ctx.handle.group.abort_peers_on_error("dispatch"):
            if ctx.is_float8:
                grads = (*map(empty_rows, grads[:n]), *grads[n:])
            back = differentiable_combine(ctx.handle, n, *(in_memory(grad) for grad in grads))
        return (None, None, None, *(None if ctx.is_float8 and i < n else grad for i, grad in enumerate(back)))


class Float8DispatchFunction(Function):
    """Dispatches rows as fp8. Their gradients are not converted (straight-through)."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: Handle,
        num_ranks: int,
        scales: list[torch.Tensor],
        clears_end: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        x, values, weights = tensors[:num_ranks], tensors[num_ranks : 2 * num_ranks], tensors[2 * num_ranks :]
        ctx.handle, ctx.num_ranks = handle, num_ranks
        with handle.group.abort_peers_on_error():
            out, out_scales, out_weights = launches.launch_dispatch(
                handle, values, scales, weights or None, clears_end=clears_end
            )
            assert out_scales is not None
            rows = [float8.dequantize(*parts, x[0].dtype) for parts in zip(out, out_scales, strict=True)]
        return (*rows, *(out_weights or ()))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n = ctx.num_ranks
        with ctx.handle.group.abort_peers_on_error("dispatch"):
            back = differentiable_combine(ctx.handle, n, *(in_memory(grad) for grad in grads))
        return (None, None, None, None, *back[:n], *(None,) * n, *back[n:])


class CombineFunction(Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, num_ranks: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.num_ranks = handle, num_ranks
        return _combine(handle, num_ranks, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.handle.group.abort_peers_on_error("combine"):
            back = differentiable_dispatch(ctx.handle, ctx.num_ranks, *(in_memory(grad) for grad in grads))
        return (None, None, *back)


class WeightedCombineFunction(Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, num_ranks: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.num_ranks = handle, num_ranks
        ctx.save_for_backward(*tensors)
        with handle.group.abort_peers_on_error():
            out, _ = launches.launch_combine(handle, tensors[:num_ranks], None, tensors[num_ranks:])
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n, handle = ctx.num_ranks, ctx.handle
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them
        x, weights = saved[:n], saved[n:]
        x_grads: list[torch.Tensor | None] = [None] * n
        weight_grads: list[torch.Tensor | None] = [None] * n
        with handle.group.abort_peers_on_error("combine"):
            marks = [row_marks(grad, handle.topk) for grad in grads]
            back = differentiable_dispatch(handle, n, *(in_memory(grad) for grad in grads), *marks)
            rows = back[:n]
            is_row = [(mark != 0).any(dim=1) if handle.is_flat else mark != 0 for mark in back[n:]]
            for i in range(n):
                given = (x[i], weights[i], rows[i], is_row[i])
                if ctx.needs_input_grad[2 + i]:
                    x_grads[i] = launches.gradient_of_rows(*given)
                if ctx.needs_input_grad[2 + n + i]:
                    weight_grads[i] = launches.gradient_of_weights(*given)
        return (None, None, *x_grads, *weight_grads)
