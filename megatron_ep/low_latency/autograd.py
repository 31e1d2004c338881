"""Low-latency dispatch and combine as functions of torch.autograd, on checked arguments.

Tensors come one after the other: the rows of each rank of this process, then the weights, if any, of each. pending: a
list to which the call is added, None: it is received at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from megatron_ep.low_latency.calls import Counters, Pending
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.rows import Float8
from megatron_ep.normal.autograd import in_memory, need_gradient

Out = Sequence[torch.Tensor] | None


def differentiable_dispatch(
    handle: LowLatencyHandle,
    ids: Sequence[torch.Tensor],
    pending: list[Pending] | None,
    fp8: Float8 | None,
    counters: Counters | None,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As `DispatchFunction`, which takes torch longer and is for gradients: then rows without a token are zeros."""
    if need_gradient(tensors):
        return DispatchFunction.apply(handle, ids, pending, fp8, counters, *tensors)
    out, probs, scales = _dispatch(handle, ids, pending, fp8, counters, *tensors, zero=False)
    return (*out, *probs, *scales)


def differentiable_combine(
    handle: LowLatencyHandle,
    sum_at_expert: bool,
    out: Out,
    pending: list[Pending] | None,
    counters: Counters | None,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As `CombineFunction`."""
    run = CombineFunction.apply if need_gradient(tensors) else _combine
    return run(handle, sum_at_expert, out, pending, counters, *tensors)


def differentiable_weighted_combine(
    handle: LowLatencyHandle,
    sum_at_expert: bool,
    out: Out,
    pending: list[Pending] | None,
    counters: Counters | None,
    renormalize: bool,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As `WeightedCombineFunction`."""
    if need_gradient(tensors):
        return WeightedCombineFunction.apply(handle, sum_at_expert, out, pending, counters, *tensors)
    return _weighted_combine(handle, sum_at_expert, out, pending, counters, *tensors, renormalize=renormalize)


def _dispatch(
    handle: LowLatencyHandle,
    ids: Sequence[torch.Tensor],
    pending: list[Pending] | None,
    fp8: Float8 | None,
    counters: Counters | None,
    *tensors: torch.Tensor,
    zero: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    n = len(handle.ranks)
    with handle.calls.group.abort_peers_on_error():
        out, probs, scales, call = handle.calls.launch_dispatch(
            handle, ids, tensors[:n], tensors[n:] or None, fp8, counters, zero=zero, at_once=pending is None
        )
    if pending is not None:
        pending.append(call)
    return out, probs, scales


def _combine(
    handle: LowLatencyHandle,
    sum_at_expert: bool,
    out: Out,
    pending: list[Pending] | None,
    counters: Counters | None,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    n = len(handle.ranks)
    with handle.calls.group.abort_peers_on_error():
        y, y_values, call = handle.calls.launch_combine(
            handle,
            tensors[:n],
            values=tensors[n:] or None,
            sum_at_expert=sum_at_expert,
            out=out,
            counters=counters,
            at_once=pending is None,
        )
    if pending is not None:
        pending.append(call)
    return (*y, *(y_values or ()))


def _weighted_combine(
    handle: LowLatencyHandle,
    sum_at_expert: bool,
    out: Out,
    pending: list[Pending] | None,
    counters: Counters | None,
    *tensors: torch.Tensor,
    renormalize: bool = False,
) -> tuple[torch.Tensor, ...]:
    n = len(handle.ranks)
    with handle.calls.group.abort_peers_on_error():
        y, _, call = handle.calls.launch_combine(
            handle,
            tensors[:n],
            row_weights=tensors[n:] if sum_at_expert else None,
            token_weights=None if sum_at_expert else tensors[n:],
            sum_at_expert=sum_at_expert,
            renormalize=renormalize,
            out=out,
            counters=counters,
            at_once=pending is None,
        )
    if pending is not None:
        pending.append(call)
    return tuple(y)


class DispatchFunction(Function):
    """(x, weights) per rank -> (rows, probs) per rank.

    As float8 -> (rows, probs, scales, and, if x gets a gradient, what stands in for the rows to get theirs) per rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handle: LowLatencyHandle,
        ids: Sequence[torch.Tensor],
        pending: list[Pending] | None,
        fp8: Float8 | None,
        counters: Counters | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.fp8, ctx.has_probs = handle, fp8, len(tensors) > len(handle.ranks)
        out, probs, scales = _dispatch(handle, ids, pending, fp8, counters, *tensors, zero=True)
        stand_ins = []
        if fp8 is not None:
            ctx.mark_non_differentiable(*out, *scales)
            if fp8.straight_through:
                stand_ins = [tensors[0].new_empty(()).expand_as(rows) for rows in out]
        return (*out, *probs, *scales, *stand_ins)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n, no_x_grads = len(ctx.handle.ranks), 0
        if ctx.fp8 is not None:
            rows, probs = grads[-n:], grads[n : 2 * n] if ctx.has_probs else ()
            if not ctx.fp8.straight_through:  # the weights' gradients alone travel, beside rows without elements
                rows = tuple(grad.new_empty(*grad.shape, 0) for grad in probs)
                no_x_grads = n
            grads = (*rows, *probs)
        back = CombineFunction.apply(
            ctx.handle.in_backward(), False, None, None, None, *(in_memory(grad) for grad in grads)
        )
        return (*(None,) * (5 + no_x_grads), *back[no_x_grads:])


class CombineFunction(Function):
    """(rows, values) per rank -> (sums, values [T, K]) per rank."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: LowLatencyHandle,
        sum_at_expert: bool,
        out: Out,
        pending: list[Pending] | None,
        counters: Counters | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.handle = handle
        return _combine(handle, sum_at_expert, out, pending, counters, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, None, None, *spread(ctx.handle, grads))


class WeightedCombineFunction(Function):
    """(rows, weights) per rank -> sums per rank; the weights lie with the rows or, [T, K], with the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: LowLatencyHandle,
        sum_at_expert: bool,
        out: Out,
        pending: list[Pending] | None,
        counters: Counters | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.handle, ctx.sum_at_expert = handle, sum_at_expert
        ctx.save_for_backward(*tensors)
        return _weighted_combine(handle, sum_at_expert, out, pending, counters, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handle = ctx.handle
        n = len(handle.ranks)
        saved = ctx.saved_tensors
        x, weights = saved[:n], saved[n:]
        back = spread(handle, (*grads, *(() if ctx.sum_at_expert else weights)))
        rows, row_weights = back[:n], weights if ctx.sum_at_expert else back[n:]
        is_row = [handle.is_row(rank).view(x[0].shape[:-1]) for rank in handle.ranks]
        x_grads, products = [], []
        for i in range(n):
            zero = row_weights[i].new_zeros(())
            factors = torch.where(is_row[i], row_weights[i], zero).unsqueeze(-1)
            x_grads.append((rows[i] * factors).to(x[i].dtype))
            products.append(torch.where(is_row[i], (rows[i].to(zero.dtype) * x[i]).sum(dim=-1), zero))
        if ctx.sum_at_expert or not any(ctx.needs_input_grad[5 + n :]):
            return (None, None, None, None, None, *x_grads, *products)
        # Each product goes to its token's rank, beside rows without elements.
        nothing = [grad.new_empty(*grad.shape[:-1], 0) for grad in x_grads]
        weight_grads = CombineFunction.apply(handle.in_backward(), False, None, None, None, *nothing, *products)[n:]
        return (None, None, None, None, None, *x_grads, *weight_grads)


def spread(handle: LowLatencyHandle, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What lies with the tokens of a dispatch, at their rows; zeros elsewhere."""
    return DispatchFunction.apply(
        handle.again(), handle.sent_ids(), None, None, None, *(in_memory(tensor) for tensor in tensors)
    )
