"""Autograd functions of low-latency dispatch and combine, on checked arguments. Calls without a gradient do not use
them, because torch would take longer.

`tensors` are the rows of each rank of this process, followed by the weights of each, if any; `run` launches a call of
them, and returns what each rank receives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from megatron_ep.low_latency.calls import CombineInputs, DispatchInputs
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.plans import CombinePlan, Pending
from megatron_ep.normal.autograd import gradient_of_rows, gradient_of_weights, in_memory
from megatron_ep.normal.plan import at

Tensors = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]
Run = Callable[[], Sequence[tuple[torch.Tensor | None, ...]]]


def differentiable_dispatch(
    handle: LowLatencyHandle, inputs: Sequence[DispatchInputs], pending: list[Pending] | None
) -> tuple[Tensors, Tensors | None, Tensors | None, Tensors | None]:
    """Returns rows, with zeros without a token, probs, scales, and tensors that receive the gradient of float8 rows
    (straight through); of all ranks each, or None."""
    run = functools.partial(handle.calls.dispatch, handle, handle.calls.backend, inputs, pending, zero=True)
    n, x, weights = len(inputs), [given[0] for given in inputs], [given[2] for given in inputs]
    out = DispatchFunction.apply(handle, run, *_given(x, weights))
    rows, *parts = (out[i : i + n] for i in range(0, len(out), n))
    probs = None if weights[0] is None else parts.pop(0)
    scales = None if handle.plan.float8 is None else parts.pop(0)
    return rows, probs, scales, parts.pop() if parts else None


def differentiable_combine(
    handle: LowLatencyHandle, plan: CombinePlan, inputs: Sequence[CombineInputs], pending: list[Pending] | None
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns (sums, None) of each rank."""
    run = functools.partial(handle.calls.combine, handle, handle.calls.backend, plan, inputs, pending)
    x, weights = [given[0] for given in inputs], [given[2] for given in inputs]
    if weights[0] is None:
        sums = CombineFunction.apply(handle, run, *x)
    else:
        sums = WeightedCombineFunction.apply(handle, run, plan.sum_at_expert, *x, *weights)
    return [(y, None) for y in sums]


def _given(*lists: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensors in lists for tensor in tensors if tensor is not None]


def _launched(handle: LowLatencyHandle, run: Run) -> Tensors:
    """Returns the results of a call: those of all ranks of one kind, then of the next."""
    with handle.group.abort_peers_on_error():
        return tuple(_given(*zip(*run(), strict=True)))


class DispatchFunction(Function):
    """Dispatches (x, weights) of each rank to (rows, probs).

    Float8 also gives scales and, if x gets a gradient, the tensors that receive the gradient of rows.
    """

    @staticmethod
    def forward(ctx: Any, handle: LowLatencyHandle, run: Run, *tensors: torch.Tensor) -> Tensors:
        n = len(handle.plan.num_tokens)
        ctx.handle, ctx.is_float8, ctx.has_probs = handle, handle.plan.float8 is not None, len(tensors) > n
        becomes_float8 = ctx.is_float8 and tensors[0].dtype != torch.float8_e4m3fn
        ctx.straight_through = becomes_float8 and any(ctx.needs_input_grad[2 : 2 + n])
        out = _launched(handle, run)
        if ctx.is_float8:
            ctx.mark_non_differentiable(*out[:n], *out[-n:])
            if ctx.straight_through:
                out += tuple(tensors[0].new_empty(()).expand_as(rows) for rows in out[:n])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        n, no_x_grads = len(ctx.handle.layouts), 0
        if ctx.is_float8:
            rows, probs = grads[-n:], grads[n : 2 * n] if ctx.has_probs else ()
            if not ctx.straight_through:  # only gradients of weights travel, with rows without elements
                rows = tuple(grad.new_empty(*grad.shape, 0, dtype=torch.float32) for grad in probs)
                no_x_grads = n
            grads = (*rows, *probs)
        with ctx.handle.group.abort_peers_on_error("dispatch"):
            back = bring_back(ctx.handle, [in_memory(grad) for grad in grads])
        return (*(None,) * (2 + no_x_grads), *back[no_x_grads:])


class CombineFunction(Function):
    """Combines (rows, values) of each rank to (sums, values [T, K])."""

    @staticmethod
    def forward(ctx: Any, handle: LowLatencyHandle, run: Run, *tensors: torch.Tensor) -> Tensors:
        ctx.handle = handle
        return _launched(handle, run)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        with ctx.handle.group.abort_peers_on_error("combine"):
            return (None, None, *spread(ctx.handle, grads))


class WeightedCombineFunction(Function):
    """Combines (rows, weights) of each rank to sums; there is one weight per row, or [T, K] of the tokens."""

    @staticmethod
    def forward(ctx: Any, handle: LowLatencyHandle, run: Run, sum_at_expert: bool, *tensors: torch.Tensor) -> Tensors:
        ctx.handle, ctx.sum_at_expert = handle, sum_at_expert
        ctx.save_for_backward(*tensors)
        return _launched(handle, run)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Gradients:
        with ctx.handle.group.abort_peers_on_error("combine"):
            return (None, None, None, *WeightedCombineFunction._backward(ctx, grads))

    @staticmethod
    def _backward(ctx: Any, grads: Tensors) -> Gradients:
        handle, n, saved = ctx.handle, len(ctx.handle.layouts), ctx.saved_tensors
        x, weights = saved[:n], saved[n:]
        back = spread(handle, (*grads, *(() if ctx.sum_at_expert else weights)))
        rows, row_weights = back[:n], weights if ctx.sum_at_expert else back[n:]
        is_row = [handle.is_row(i).view(x[0].shape[:-1]) for i in range(n)]
        parts = list(zip(x, row_weights, rows, is_row, strict=True))
        x_grads, products = [gradient_of_rows(*part) for part in parts], [gradient_of_weights(*part) for part in parts]
        if ctx.sum_at_expert or not any(ctx.needs_input_grad[3 + n :]):
            return (*x_grads, *products)
        # Each product is sent to the rank of its token, with rows without elements.
        nothing = [grad.new_empty(*grad.shape[:-1], 0) for grad in x_grads]
        return (*x_grads, *bring_back(handle, [*nothing, *products])[n:])


def spread(handle: LowLatencyHandle, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Sends tensors of a dispatch's tokens to their rows; other rows are zeros."""
    n, ids, plan = len(handle.layouts), handle.sent_ids(), handle.plan
    sent = [in_memory(tensor) for tensor in tensors]
    x, weights = sent[:n], sent[n:]
    of_these = handle.calls.plan(
        x,
        handle.topk,
        ids[0].element_size(),
        weights or None,
        None,
        masked=plan.masked,
        expert_alignment=plan.expert_alignment,
        rows=plan.rows,
    )
    inputs = [(x[i], ids[i], at(weights, i), None, None, None) for i in range(n)]
    handle.check()
    made = LowLatencyHandle(handle.calls, of_these, handle.forward or handle)
    run = functools.partial(handle.calls.dispatch, made, handle.calls.backend, inputs, None, zero=True)
    return DispatchFunction.apply(made, run, *sent)


def bring_back(handle: LowLatencyHandle, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Sums tensors of a dispatch's rows at their tokens; values of rows return as [T, K]."""
    n = len(handle.layouts)
    x, values = tensors[:n], tensors[n:]
    plan = handle.calls.plan_combine(handle, x[0], at(values, 0), sum_at_expert=False, renormalize=False)
    inputs = [(x[i], at(values, i), None, None, None) for i in range(n)]
    same = handle.in_backward()
    run = functools.partial(handle.calls.combine, same, handle.calls.backend, plan, inputs, None)
    return CombineFunction.apply(same, run, *tensors)
