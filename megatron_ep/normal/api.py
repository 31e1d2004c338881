"""Dispatch and combine as differentiable functions.

With a Buffer they take and return tensors, with a LocalCluster lists with one tensor per rank. As linear maps, dispatch
and combine are each other's transpose: the backward pass of each is the other, and can itself be differentiated.

Shapes: T tokens of this rank, H elements of a row, K experts of a token, E experts in all, L = E / ranks local experts,
R rows that arrive on this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ep.buffer.any_buffer import AnyBuffer
from megatron_ep.buffer.arguments import Tensors
from megatron_ep.buffer.interface import Backend
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.normal import autograd, cached_plans, checks, operators
from megatron_ep.normal import plan as plans
from megatron_ep.normal.handle import CountRequest, Handle, shapes_of
from megatron_ep.normal.one_hop import goes_in_one_hop


@dataclass(repr=False)
class Received:
    """Result of dispatch: tensors, or lists with one tensor per rank with a LocalCluster.

    x: [R, H], in the dtype that was dispatched. Rows are grouped by local expert and ordered by (source rank, token)
        for each. With layout "flat": one row per token that arrived, ordered by (source rank, token). If the host has
        waited for the counts on a GPU, tensors with R rows may have memory for R / 7 + 74 more rows.
    scales: [R, ceil(H / 128)], only for float8.
    probs: [R], the weight of each row, 0 for padding and for rows after the last expert's; None if no weights were
        passed. Flat: [R, K], 0 where topk_idx is -1.
    tokens_per_expert: int64 [L], padding included; sums to R unless max_recv_tokens fixed R. Flat: rounded up to
        expert_alignment, although there is no padding; a row counts for each of its experts. On the CPU, except with
        max_recv_tokens on a GPU, where the host does not wait for it.
    overflow: int32 [1], not 0 if rows did not fit into expert_capacity or max_recv_tokens; those rows are missing.
    handle: argument of combine, or of another dispatch with the same layout.
    topk_idx: flat: int32 [R, K], the local experts of each row, in [0, L), or -1, also in all rows after the last one.
        Belongs to the handle: do not write to it. None if rows are grouped.
    """

    x: Any
    scales: Any
    probs: Any
    tokens_per_expert: Any
    overflow: Any
    handle: Handle
    topk_idx: Any = None

    def __repr__(self) -> str:
        return shapes_of(self, "x", "scales", "probs", "topk_idx")


class _ReceivedLater(Received):
    """Reads counts and overflow from the handle on first access, because creating the tensors takes time."""

    def __init__(self, x: Any, scales: Any, probs: Any, *, handle: Handle, **known: Any):
        """known: fields passed by `dataclasses.replace`; they are not read from the handle."""
        self.x, self.scales, self.probs, self.handle = x, scales, probs, handle
        if known:
            self.__dict__.update(known)

    @functools.cached_property
    def tokens_per_expert(self) -> Any:
        return self.handle.group.for_caller(cached_plans.tokens_per_expert_of(self.handle))

    @functools.cached_property
    def overflow(self) -> Any:
        return self.handle.group.for_caller(cached_plans.overflow_of(self.handle))

    @functools.cached_property
    def topk_idx(self) -> Any:
        return _flat_ids_of(self.handle)


_ReceivedLater.__name__ = "Received"  # the name that users see; pickle finds the class by its __qualname__


def dispatch(
    x: Tensors,
    topk_idx: Tensors | None = None,
    topk_weights: Tensors | None = None,
    *,
    buffer: AnyBuffer | None = None,
    handle: Handle | None = None,
    scales: Tensors | None = None,
    expert_alignment: int = 1,
    expert_capacity: int | None = None,
    max_recv_tokens: int | None = None,
    forward_dtype: torch.dtype | None = None,
    forward_scales: str = "fp32",
    layout: str = "grouped",
    max_tokens: int | None = None,
) -> Received:
    """Sends every token to the ranks of its experts. Is one operator inside `torch.compile`: see docs/tuning.md.

    Collective, and so is the backward pass: the result must contribute to the loss on all ranks or on none, and x and
    topk_weights must require a gradient on all ranks or on none.

    x: [T, H]; bfloat16, float16, float32, float64, or float8_e4m3fn with scales. T may differ between ranks and be 0;
        dtype and H may not differ. A gradient requires a type that `combine` takes; float8 gets none. This and other
        tensors that are not contiguous are copied.
    topk_idx: [T, K], int32 or int64, K <= 32: distinct expert ids in [0, E), or -1 for no expert.
    topk_weights: [T, K], float32 or float64: arrives with the rows as `probs`. Gets a gradient. bfloat16 and float16
        become float32.
    buffer: a Buffer or LocalCluster.
    handle: instead of topk_idx and buffer: repeats the layout of an earlier dispatch without exchanging counts.
    scales: [T, ceil(H / 128)], float32 or float8_e8m0fnu, one per 128 elements of a float8 row. Gets no gradient.
    expert_alignment: pads the rows of each expert with zero rows to a multiple of this.
    expert_capacity: gives each expert exactly this many rows. Rows of x that no token fills are undefined, or zeros if
        x or topk_weights requires a gradient. Rows that do not fit are omitted and reported in `overflow`.
    max_recv_tokens: fixes R. Rows of x after the last expert's are undefined, or zeros if x or topk_weights requires a
        gradient. Rows beyond R are omitted. A token is omitted completely (zeros) if it is not among the first R to
        arrive, in the order of (source rank, token); with expert_capacity the limit is max(R, W * T). Both are reported
        in `overflow`. On a GPU the call is then free of host waits, as CUDA graphs require, so invalid ids in topk_idx
        are found later, by the next call or `synchronize`; so they may be in a call in one hop whose host waits.
        With several nodes and different T, R must also be at least the number of tokens that any rank sends to another
        node, and the ranks of that node must have room for them.
    forward_dtype: torch.float8_e4m3fn: rows of bfloat16, float16 or float32 are sent as results of `float8.quantize`
        and received as those of `float8.dequantize`, in x's dtype. Their gradient is that of unrounded rows, sent in
        x's dtype. None: rows are sent unchanged.
    forward_scales: the scales of forward_dtype: "fp32", or "pow2" for experts that quantize again, see
        `float8.quantize`.
    layout: "grouped": one row for each of a token's experts on this rank, grouped by expert. "flat": one row per token,
        with the local experts that it chose in `Received.topk_idx`; combine then also takes one row per token, summed
        by the caller over the experts of this rank. Writes fewer bytes; for experts that permute rows themselves. Not
        with expert_capacity, nor inside `torch.compile`. With a handle, rows have the layout of its dispatch.
    max_tokens: a promise, equal on all ranks, that no rank passes more tokens to this call; instead of
        `Config.max_tokens`, which must be given with it. Calls with few tokens go in one hop: see docs/tuning.md.
        Results are the same, bit for bit, but for sums over several nodes, which have the bits that they have in one.

    Raises ValueError for an invalid argument before anything is sent, on a GPU in one hop for ids while rows are sent;
    other ranks then get EPAbortError, from this call or the next. Raises EPTimeoutError if another rank does not take
    part, EPOverflowError if max_recv_tokens is too small for the rows that
    only pass through this rank.
    """
    tensors = (x, topk_idx, topk_weights, scales)
    settings: tuple[Any, ...] = (expert_alignment, expert_capacity, max_recv_tokens, layout, max_tokens)
    key = None
    if forward_dtype is None and forward_scales == "fp32":
        if torch.compiler.is_compiling():
            return _traced_dispatch(buffer, handle, tensors, settings)
        key = plans.dispatch_signature(handle, *tensors, settings)
        if key is not None:
            received = _dispatch_by_plan(key, buffer, handle, *tensors, layout)
            if received is not None:
                return received
    return _first_dispatch(key, buffer, handle, tensors, settings, forward_dtype, forward_scales)


def _traced_dispatch(
    buffer: AnyBuffer | None, handle: Handle | None, tensors: tuple[Any, ...], settings: tuple[Any, ...]
) -> Received:
    """Checks and makes a dispatch inside `torch.compile`: its operator checks what is not known before it runs."""
    group = checks.group_of(buffer, handle)
    with group.abort_peers_on_error():
        xs, ids, weights, scales, needs_gradient = checks.check_dispatch(
            group, handle, tensors, settings, is_traced=True
        )
        if handle is None:
            handle = Handle(group, ids[0].shape[1], [], _request_of(settings), ids)
    out, handle = operators.traced_dispatch(handle, xs, scales, weights, clears_end=needs_gradient)
    return Received(*_parts_of(group, out, weights, scales), *_counts_of(handle))


def _first_dispatch(
    key: tuple[Any, ...] | None,
    buffer: AnyBuffer | None,
    handle: Handle | None,
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    forward_dtype: torch.dtype | None,
    forward_scales: str,
) -> Received:
    """Checks and makes a dispatch for which there is no plan, and adds its plan to the cache under `key`."""
    group = checks.group_of(buffer, handle)
    if handle is None:
        _, _, max_recv_tokens, layout, max_tokens = settings
        checks.check_capture(group, max_recv_tokens)
    with group.abort_peers_on_error():
        group.check_usable()
        xs, ids, weights, scales, needs_gradient = checks.check_dispatch(
            group, handle, tensors, settings, is_traced=False
        )
        checks.check_forward(forward_dtype, forward_scales, xs[0])
        values: list[torch.Tensor] | None = None
        if forward_dtype is not None:
            topk = ids[0].shape[1] if handle is None else handle.topk
            beside = None if weights is None else weights[0]
            plans.format_of(group, topk, xs[0], None, beside)  # checks the rows of the backward pass
            values, scales = autograd.quantized(xs, forward_scales, forward_dtype)
        if handle is None:
            request = _request_of(settings)
            one_hop = request if goes_in_one_hop(group, layout, max_tokens, xs[0]) else None
            handle = Handle(group, ids[0].shape[1], [], request, ids, is_flat=layout == "flat", one_hop=one_hop)
        plan = cached_plans.dispatch_plan(handle, values or xs, scales, weights, clears_end=needs_gradient)
        if weights is None or weights[0] is tensors[2]:  # else the plan is of converted weights
            group.call_cache.add(key, plan)
        run = autograd.sends(plan, handle, scales, values)
    # This is outside the `with`, because torch ends the recomputation of a checkpoint by an exception out of `apply`.
    if values or needs_gradient:
        out = autograd.DispatchFunction.apply(handle, run, *xs, *(weights or ()))
    else:
        out = run(*xs, *(weights or ()))
    parts = _parts_of(group, out, weights, None if values else scales)
    if not group.live_backend().is_capturing():
        return _ReceivedLater(*parts, handle=handle)
    # A CUDA graph updates only what it has captured, so counts and overflow are read now.
    return Received(*parts, *_counts_of(handle))


def _request_of(settings: tuple[Any, ...]) -> CountRequest:
    expert_alignment, expert_capacity, max_recv_tokens, *_ = settings
    return CountRequest(expert_alignment, expert_capacity or 0, max_recv_tokens)


def _parts_of(
    group: RankGroup, out: Sequence[torch.Tensor], weights: object | None, scales: object | None
) -> tuple[Any, Any, Any]:
    """Returns rows, scales and probs for the caller. out: rows, weights and scales of each rank, if they were sent."""
    n, one = len(group.ranks), group.for_caller
    out_scales = None if scales is None else one(list(out[-n:]))
    return one(list(out[:n])), out_scales, None if weights is None else one(list(out[n : 2 * n]))


def _counts_of(handle: Handle) -> tuple[Any, ...]:
    """Returns the fields of `Received` from tokens_per_expert on."""
    one = handle.group.for_caller
    counts, overflow = one(cached_plans.tokens_per_expert_of(handle)), one(cached_plans.overflow_of(handle))
    return counts, overflow, handle, _flat_ids_of(handle)


def _dispatch_by_plan(
    key: tuple[Any, ...],
    buffer: AnyBuffer | None,
    handle: Handle | None,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scales: Any,
    layout: str,
) -> Received | None:
    """Runs the cached plan of this call. Returns None if there is none, or the call must be checked in full."""
    if buffer is not None and not isinstance(buffer, AnyBuffer):
        return None
    group = buffer._group if buffer is not None else handle.group if handle is not None else None
    if group is None or (handle is not None and handle.group is not group):
        return None
    plan: Any = group.call_cache.get(key)
    backend = group._backend
    if plan is None or backend is None or backend.is_capturing() or backend.aborted() is not None:
        return None
    if handle is None:
        handle = Handle(group, plan.topk, [], None, (topk_idx,), is_flat=layout == "flat", one_hop=plan.one_hop)
    row_scales, weights = None if scales is None else (scales,), None if topk_weights is None else (topk_weights,)
    if not key[0]:
        [outputs] = _run(plan, handle, backend, (x,), row_scales, weights)
        return _ReceivedLater(*outputs, handle=handle)
    out = autograd.DispatchFunction.apply(handle, autograd.sends(plan, handle, row_scales), x, *(weights or ()))
    return _ReceivedLater(out[0], row_scales and out[-1], weights and out[1], handle=handle)


def _run(plan: Any, handle: Handle, backend: Backend, *tensors: Any) -> Any:
    """Launches a call without a gradient, by few functions, of which each takes time."""
    try:
        return plan.run(handle, backend, *tensors)
    except BaseException as error:
        handle.group.abort_peers(error)
        raise


def _flat_ids_of(handle: Handle) -> Any:
    return handle.group.for_caller([rank.dst_rows for rank in handle.ranks]) if handle.is_flat else None


def combine(
    x: Tensors, handle: Handle, weights: Tensors | None = None, *, backward_dtype: torch.dtype | None = None
) -> Any:
    """Brings the rows of a dispatch back and sums them per token. Collective, and so is its backward pass.

    x: [R, H]; bfloat16, float32, float16 or float64 (a GPU sums the last two only if MEGATRON_EP_DTYPES named them at
        build time); rows in the order of the dispatch of `handle`. Rows of padding are ignored. Gets a gradient. With
        flat rows each row is this rank's result for one token. Copied if it is not contiguous.
    handle: handle of the dispatch.
    weights: [R], float32, or float64 if x is float64 (bfloat16 and float16 are converted): factor of each row of x, on
        all ranks or on none. Weights of padding are ignored. Gets a gradient. Saves the pass over x of
        `x * weights.unsqueeze(1)`, and its rounding to x's dtype. Keeps x for the backward pass.
    backward_dtype: torch.float8_e4m3fn or torch.float8_e5m2: in the backward pass the rows of g (see below), of
        bfloat16, float16 or float32, are sent as results of `float8.quantize(g, "pow2", backward_dtype)` and received
        as those of `float8.dequantize`, in x's dtype. Not with weights. None: they are sent unchanged.

    Returns [T, H] in x's dtype: y[token] is the sum of weights[row] * x[row] over the rows of the token, or of x[row]
    without weights; zeros for a token without experts. Products and sums run in float32 (float64 for float64), each
    product rounded before it is added, in a fixed order: over the experts of a rank, then the ranks of a node, then the
    nodes; between these the sums travel in x's dtype.

    With g the gradient of y, dispatched to the rows: the gradient of x is weights[row] * g[row], rounded to its dtype,
    that of weights the sum over H of g[row] * x[row], in their dtype, and that of padding zeros.

    Raises ValueError for an invalid argument before anything is sent; other ranks then get EPAbortError. Raises
    EPTimeoutError if another rank does not take part.
    """
    if not isinstance(handle, Handle):
        raise ValueError(f"handle is a {type(handle).__name__}, must be the handle of a dispatch")
    group, key = handle.group, None
    if backward_dtype is None:
        if torch.compiler.is_compiling():
            with group.abort_peers_on_error():
                xs, row_weights = checks.check_combine(handle, x, weights, is_traced=True)
            return group.for_caller(operators.traced_combine(handle, xs, row_weights))
        key = plans.combine_signature(handle, x, weights)
    if key is not None:
        plan: Any = group.call_cache.get(key)
        backend = group._backend
        if plan is not None and backend is not None and backend.aborted() is None:
            factors: Any = None if weights is None else (weights,)
            if not key[0]:
                return _run(plan, handle, backend, (x,), None, factors)[0][0]
            return _differentiable_sums(plan, handle, [x], factors)[0]
    with group.abort_peers_on_error():
        group.check_usable()
        xs, row_weights = checks.check_combine(handle, x, weights, is_traced=False)
        checks.check_backward(backward_dtype, xs[0], weights)
        plan = cached_plans.combine_plan(handle, xs, None, row_weights)
        if row_weights is None or row_weights[0] is weights:
            group.call_cache.add(key, plan)
        if not autograd.need_gradient(xs, row_weights):
            sums = plan.run(handle, group.live_backend(), xs, None, row_weights)
            return group.for_caller([y for y, _ in sums])
    return group.for_caller(_differentiable_sums(plan, handle, xs, row_weights, backward_dtype))


def _differentiable_sums(
    plan: Any,
    handle: Handle,
    xs: Sequence[Any],
    row_weights: Sequence[torch.Tensor] | None,
    backward_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    run = autograd.sums(plan, handle, is_weighted=row_weights is not None)
    if row_weights is None:
        return list(autograd.CombineFunction.apply(handle, run, backward_dtype, *xs))
    return list(autograd.WeightedCombineFunction.apply(handle, run, *xs, *row_weights))
