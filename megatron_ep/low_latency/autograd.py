"""Autograd functions of low-latency dispatch and combine, on checked arguments. Calls without a gradient do not use
them, because torch would take longer.

Tensors are the rows of each rank of this process, followed by the weights of each, if any. pending: a list to which the
call is appended; None: it is received immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from megatron_ep.low_latency.calls import Pending
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.plans import CombineArguments, DispatchArguments
from megatron_ep.normal.autograd import in_memory

Tensors = Sequence[torch.Tensor]


def differentiable_dispatch(
    handle: LowLatencyHandle,
    given: DispatchArguments,
    pending: list[Pending] | None,
    x: Tensors,
    weights: Tensors | None,
) -> tuple[Tensors, Tensors, Tensors, Tensors]:
    """Returns rows, with zeros for those without a token, probs, scales, and tensors that receive the gradient of
    float8 rows (straight through): one of each per rank, or none."""
    n, out = len(x), DispatchFunction.apply(handle, given, pending, *x, *(weights or ()))
    parts = [out[i : i + n] for i in range(0, len(out), n)]
    rows, probs = parts.pop(0), parts.pop(0) if weights is not None else ()
    scales = parts.pop(0) if given.plan.float8 is not None else ()
    return rows, probs, scales, parts.pop() if parts else ()


def differentiable_combine(
    handle: LowLatencyHandle,
    given: CombineArguments,
    pending: list[Pending] | None,
    x: Tensors,
    weights: Tensors | None,
) -> Tensors:
    """Returns the sums of each rank."""
    if weights is None:
        return CombineFunction.apply(handle, given, pending, *x)
    return WeightedCombineFunction.apply(handle, given, pending, *x, *weights)


class DispatchFunction(Function):
    """Dispatches (x, weights) of each rank to (rows, probs).

    Float8 also gives scales and, if x gets a gradient, the tensors that receive the gradient of rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handle: LowLatencyHandle,
        given: DispatchArguments,
        pending: list[Pending] | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        n = len(handle.layouts)
        ctx.handle, ctx.is_float8, ctx.has_probs = handle, given.plan.float8 is not None, len(tensors) > n
        becomes_float8 = ctx.is_float8 and tensors[0].dtype != torch.float8_e4m3fn
        ctx.straight_through = becomes_float8 and any(ctx.needs_input_grad[3 : 3 + n])
        with handle.group.abort_peers_on_error():
            out, probs, out_scales = handle.calls.launch_dispatch(
                handle, given, tensors[:n], tensors[n:] or None, zero=True, pending=pending
            )
        stand_ins = []
        if ctx.is_float8:
            ctx.mark_non_differentiable(*out, *out_scales)
            if ctx.straight_through:
                stand_ins = [tensors[0].new_empty(()).expand_as(rows) for rows in out]
        return (*out, *probs, *out_scales, *stand_ins)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n, no_x_grads = len(ctx.handle.layouts), 0
        if ctx.is_float8:
            rows, probs = grads[-n:], grads[n : 2 * n] if ctx.has_probs else ()
            if not ctx.straight_through:  # only gradients of weights travel, with rows without elements
                rows = tuple(grad.new_empty(*grad.shape, 0, dtype=torch.float32) for grad in probs)
                no_x_grads = n
            grads = (*rows, *probs)
        with ctx.handle.group.abort_peers_on_error("dispatch"):
            back = bring_back(ctx.handle, [in_memory(grad) for grad in grads])
        return (*(None,) * (3 + no_x_grads), *back[no_x_grads:])


class CombineFunction(Function):
    """Combines (rows, values) of each rank to (sums, values [T, K])."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: LowLatencyHandle,
        given: CombineArguments,
        pending: list[Pending] | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.handle = handle
        n = len(handle.layouts)
        with handle.group.abort_peers_on_error():
            y, y_values = handle.calls.launch_combine(
                handle, given, tensors[:n], values=tensors[n:] or None, pending=pending
            )
        return (*y, *y_values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.handle.group.abort_peers_on_error("combine"):
            return (None, None, None, *spread(ctx.handle, grads))


class WeightedCombineFunction(Function):
    """Combines (rows, weights) of each rank to sums; there is one weight per row, or [T, K] of the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: LowLatencyHandle,
        given: CombineArguments,
        pending: list[Pending] | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.sum_at_expert = handle, given.plan.sum_at_expert
        ctx.save_for_backward(*tensors)
        n = len(handle.layouts)
        with handle.group.abort_peers_on_error():
            y, _ = handle.calls.launch_combine(handle, given, tensors[:n], weights=tensors[n:], pending=pending)
        return tuple(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.handle.group.abort_peers_on_error("combine"):
            return WeightedCombineFunction._backward(ctx, grads)

    @staticmethod
    def _backward(ctx: Any, grads: Tensors) -> tuple[torch.Tensor | None, ...]:
        handle = ctx.handle
        n = len(handle.layouts)
        saved = ctx.saved_tensors
        x, weights = saved[:n], saved[n:]
        back = spread(handle, (*grads, *(() if ctx.sum_at_expert else weights)))
        rows, row_weights = back[:n], weights if ctx.sum_at_expert else back[n:]
        is_row = [handle.is_row(i).view(x[0].shape[:-1]) for i in range(n)]
        x_grads, products = [], []
        for i in range(n):
            zero = row_weights[i].new_zeros(())
            factors = torch.where(is_row[i], row_weights[i], zero).unsqueeze(-1)
            x_grads.append((rows[i] * factors).to(x[i].dtype))
            products.append(torch.where(is_row[i], (rows[i].to(zero.dtype) * x[i]).sum(dim=-1), zero))
        if ctx.sum_at_expert or not any(ctx.needs_input_grad[3 + n :]):
            return (None, None, None, *x_grads, *products)
        # Each product is sent to the rank of its token, with rows without elements.
        nothing = [grad.new_empty(*grad.shape[:-1], 0) for grad in x_grads]
        weight_grads = bring_back(handle, [*nothing, *products])[n:]
        return (None, None, None, *x_grads, *weight_grads)


def spread(handle: LowLatencyHandle, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Sends tensors of a dispatch's tokens to their rows; other rows are zeros."""
    n, ids, plan = len(handle.layouts), handle.sent_ids(), handle.plan
    again = handle.calls.plan(
        tensors[:n],
        handle.topk,
        ids[0].element_size(),
        tensors[n:] or None,
        None,
        masked=plan.masked,
        expert_alignment=plan.expert_alignment,
        rows=plan.rows,
    )
    given = DispatchArguments(again, ids)
    return DispatchFunction.apply(handle.again(again), given, None, *(in_memory(tensor) for tensor in tensors))


def bring_back(handle: LowLatencyHandle, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Sums tensors of a dispatch's rows at their tokens; values of rows return as [T, K]."""
    values = tensors[len(handle.layouts)] if len(tensors) > len(handle.layouts) else None
    plan = handle.calls.plan_combine(handle, tensors[0], values, sum_at_expert=False, renormalize=False)
    return CombineFunction.apply(handle.in_backward(), CombineArguments(plan), None, *tensors)
