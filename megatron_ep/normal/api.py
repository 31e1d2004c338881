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
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from megatron_ep import float8
from megatron_ep.buffer.any_buffer import AnyBuffer, rank_group_of
from megatron_ep.buffer.interface import Backend
from megatron_ep.buffer.rank_group import PAYLOAD_TYPES, RankGroup, check_summable
from megatron_ep.config import MAX_ROW_BYTES, MAX_ROWS, MAX_TOPK, require_int, require_int_or_none, require_one_of
from megatron_ep.normal import autograd, launches, operators
from megatron_ep.normal import plan as plans
from megatron_ep.normal.handle import CountRequest, Handle, shapes_of
from megatron_ep.normal.one_hop import goes_in_one_hop
from megatron_ep.reference import SCALE_BLOCK

Tensors = torch.Tensor | Sequence[torch.Tensor]

PAYLOAD_DTYPES = tuple(PAYLOAD_TYPES)
WEIGHT_DTYPES = (torch.float32, torch.float64)
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
# combine takes one weight per row, [R], not the router's [T, K].
WEIGHTS_OF_ROWS = ": one for each row of x, such as rows.probs of rows = dispatch(..., topk_weights)"
# The number of rows is an int32; rows added by padding must leave room for the others.
MAX_PADDED_ROWS = 2**30


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
        return self.handle.group.for_caller(launches.tokens_per_expert_of(self.handle))

    @functools.cached_property
    def overflow(self) -> Any:
        return self.handle.group.for_caller(launches.overflow_of(self.handle))

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
    is_traced = torch.compiler.is_compiling()
    settings: tuple[Any, ...] = (expert_alignment, expert_capacity, max_recv_tokens, layout, max_tokens)
    key = None
    if not is_traced and forward_dtype is None and forward_scales == "fp32":
        key = plans.dispatch_signature(handle, x, topk_idx, topk_weights, scales, settings)
        if key is not None:
            received = _dispatch_by_plan(key, buffer, handle, x, topk_idx, topk_weights, scales, layout)
            if received is not None:
                return received
    group = _group_of(buffer, handle)
    if handle is None and not is_traced:  # the operator does
        launches.check_capture(group, max_recv_tokens)
    with group.abort_peers_on_error():
        if not is_traced:  # the operator does
            group.check_usable()
        if handle is not None and handle.group is not group:
            raise ValueError("handle belongs to another buffer than the one given")
        taken = as_taken(topk_weights, torch.float32)
        tensors = (as_taken(x), as_taken(topk_idx), taken, as_taken(scales))
        xs, ids, weights, row_scales = _check_dispatch(group, handle, *tensors, settings, is_traced=is_traced)
        needs_gradient = autograd.need_gradient(xs, weights)
        if needs_gradient and xs[0].dtype != torch.float8_e4m3fn:
            check_summable("the gradient of x", xs[0].dtype, group.device.type)
        values: list[torch.Tensor] | None = None
        require_one_of("forward_scales", forward_scales, float8.SCALE_FORMATS)
        if forward_dtype is None and forward_scales != "fp32":
            raise ValueError(f"forward_scales is {forward_scales!r}, must be 'fp32' without forward_dtype")
        if forward_dtype is not None:
            check_forward_dtype(forward_dtype, xs[0])
            topk = ids[0].shape[1] if handle is None else handle.topk
            beside = None if weights is None else weights[0]
            plans.format_of(group, topk, xs[0], None, beside)  # checks the rows of the backward pass
            values, row_scales = autograd.quantized(xs, forward_scales, forward_dtype)
        if handle is None:
            request = CountRequest(expert_alignment, expert_capacity or 0, max_recv_tokens)
            one_hop = request if goes_in_one_hop(group, layout, max_tokens, xs[0], is_traced) else None
            handle = Handle(group, ids[0].shape[1], [], request, ids, is_flat=layout == "flat", one_hop=one_hop)
        if values or not is_traced:
            plan = launches.dispatch_plan(handle, values or xs, row_scales, weights, clears_end=needs_gradient)
            if taken is topk_weights:
                group.call_cache.add(key, plan)
            run = autograd.sends(plan, handle, row_scales, values)
    # This is outside the `with`, because torch ends the recomputation of a checkpoint by an exception out of `apply`.
    n = len(group.ranks)
    out: Sequence[torch.Tensor]
    if is_traced and not values:
        out, handle = operators.traced_dispatch(handle, xs, row_scales, weights, clears_end=needs_gradient)
    elif values or needs_gradient:
        out = autograd.DispatchFunction.apply(handle, run, *xs, *(weights or ()))
        row_scales = None if values else row_scales
    else:
        out = run(*xs, *(weights or ()))
    probs = list(out[n : 2 * n]) if weights is not None else None
    out_scales = list(out[-n:]) if row_scales is not None else None
    return _received_of(group, handle, list(out[:n]), out_scales, probs, is_traced=is_traced)


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


def _received_of(
    group: RankGroup,
    handle: Handle,
    rows: list[torch.Tensor],
    scales: list[torch.Tensor] | None,
    probs: list[torch.Tensor] | None,
    *,
    is_traced: bool,
) -> Received:
    one = group.for_caller
    parts = (one(rows), None if scales is None else one(scales), None if probs is None else one(probs))
    # A CUDA graph updates only what it has captured, so read counts and overflow now.
    if not is_traced and not group.live_backend().is_capturing():
        return _ReceivedLater(*parts, handle=handle)
    counts, overflow = one(launches.tokens_per_expert_of(handle)), one(launches.overflow_of(handle))
    return Received(*parts, counts, overflow, handle, _flat_ids_of(handle))


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
    group, is_traced = handle.group, torch.compiler.is_compiling()
    key = None if is_traced or backward_dtype is not None else plans.combine_signature(handle, x, weights)
    if key is not None:
        plan: Any = group.call_cache.get(key)
        backend = group._backend
        if plan is not None and backend is not None and backend.aborted() is None:
            row_weights: Any = None if weights is None else (weights,)
            if not key[0]:
                return _run(plan, handle, backend, (x,), None, row_weights)[0][0]
            return _differentiable_sums(plan, handle, [x], row_weights)[0]
    with group.abort_peers_on_error():
        if not is_traced:  # the operator does
            group.check_usable()
        given = weights
        x, weights = as_taken(x), as_taken(weights, weight_dtype(x))
        xs, row_weights = _check_combine(group, handle, x, weights, is_traced)
        if backward_dtype is not None:
            check_backward_dtype(backward_dtype, xs[0], weights)
        if backward_dtype is not None or not is_traced:
            plan = launches.combine_plan(handle, xs, None, row_weights)
            if weights is given:
                group.call_cache.add(key, plan)
            if not autograd.need_gradient(xs, row_weights):
                sums = plan.run(handle, group.live_backend(), xs, None, row_weights)
                return group.for_caller([y for y, _ in sums])
    if is_traced and backward_dtype is None:
        out = operators.traced_combine(handle, xs, row_weights)
    else:
        out = _differentiable_sums(plan, handle, xs, row_weights, backward_dtype)
    return group.for_caller(out)


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


# ---- arguments


def _group_of(buffer: AnyBuffer | None, handle: Handle | None) -> RankGroup:
    """Returns the ranks to use. If the buffer is ambiguous, ends the call on the other ranks of the likely one."""
    if handle is not None and not isinstance(handle, Handle):
        if isinstance(buffer, AnyBuffer):
            rank_group_of(buffer).refuse()
        raise ValueError(f"handle is a {type(handle).__name__}, must be the handle of a dispatch")
    if buffer is None and handle is None:
        raise ValueError("buffer is None, must be a Buffer or LocalCluster (or pass a handle)")
    if buffer is None and handle is not None:
        return handle.group
    if not isinstance(buffer, AnyBuffer) and handle is not None:
        handle.group.refuse()
    return rank_group_of(buffer)


def _check_dispatch(
    group: RankGroup,
    handle: Handle | None,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    scales: Any,
    settings: tuple[Any, ...],
    *,
    is_traced: bool,
) -> tuple[Any, ...]:
    """Returns the lists of x, topk_idx, topk_weights and scales, with one tensor per rank of this process. Raises
    ValueError for invalid arguments. settings: in the order of `plans.DEFAULTS`."""
    expert_alignment, expert_capacity, max_recv_tokens, layout, max_tokens = settings
    xs, ids = as_list("x", x, group, is_traced), None
    weights = None if topk_weights is None else as_list("topk_weights", topk_weights, group, is_traced)
    row_scales = None if scales is None else as_list("scales", scales, group, is_traced)
    if handle is None:
        ids = as_list("topk_idx", topk_idx, group, is_traced)
        check_ids(ids)
        check_alignment(group, expert_alignment)
        require_int_or_none("expert_capacity", expert_capacity, 1, MAX_PADDED_ROWS // group.num_local_experts)
        if not is_traced:
            check_num_tokens(group, ids, expert_alignment)
        _check_promise(group, ids, max_tokens, is_traced)
        require_int_or_none("max_recv_tokens", max_recv_tokens, 1, MAX_ROWS)
        if expert_capacity is not None and expert_alignment != 1:
            raise ValueError(f"expert_alignment is {expert_alignment}, must be 1 with expert_capacity")
        require_one_of("layout", layout, ("grouped", "flat"))
        if layout == "flat" and expert_capacity is not None:
            raise ValueError(f"expert_capacity is {expert_capacity}, must be None with layout 'flat'")
        if layout == "flat" and is_traced:
            raise ValueError("layout is 'flat', must be 'grouped' inside torch.compile")
        num_tokens, topk = [idx.shape[0] for idx in ids], ids[0].shape[1]
    else:
        given = zip((topk_idx, *settings), {"topk_idx": None, **plans.DEFAULTS}.items(), strict=True)
        for value, (name, default) in given:
            if not (value is default or (type(value) is type(default) and value == default)):
                raise ValueError(f"{name} must not be given with a handle, which has its own")
        _check_traced(handle, is_traced)
        num_tokens, topk = [rank.num_tokens for rank in handle.ranks], handle.topk
    check_payload("x", xs, num_tokens, is_traced)
    check_weights("topk_weights", weights, [(tokens, topk) for tokens in num_tokens], WEIGHT_DTYPES)
    check_scales(xs, row_scales)
    return xs, ids, weights, row_scales


def _check_combine(
    group: RankGroup, handle: Handle, x: Any, weights: Any, is_traced: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Returns the lists of x and weights. Raises ValueError for invalid arguments."""
    _check_traced(handle, is_traced)
    xs = as_list("x", x, group, is_traced)
    rows = [rank.rows for rank in handle.ranks]
    check_summable("x", xs[0].dtype, group.device.type)
    check_payload("x", xs, rows, is_traced)
    row_weights = None if weights is None else as_list("weights", weights, group, is_traced)
    check_weights("weights", row_weights, [(count,) for count in rows], (weight_dtype(x),), WEIGHTS_OF_ROWS)
    return xs, row_weights


def _check_traced(handle: Handle, is_traced: bool) -> None:
    if is_traced and handle.is_flat:  # operators have no handle of flat rows
        raise ValueError("handle is of flat rows, must be of grouped ones inside torch.compile")
    if is_traced and handle.one_hop is not None:
        raise ValueError("handle is of a dispatch outside torch.compile in one hop, must be of one inside it")


def as_taken(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns a tensor, or each of a list, contiguous, and bfloat16 and float16 in dtype; a gradient passes through.

    Other values are returned unchanged, and a later check raises for them.
    """
    if isinstance(value, (list, tuple)):
        return [as_taken(item, dtype) for item in value]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    return (value.to(dtype) if dtype and value.dtype in (torch.bfloat16, torch.float16) else value).contiguous()


def weight_dtype(x: Any) -> torch.dtype:
    """Returns the dtype of weights that multiply x, a tensor or a list of them."""
    first = x[0] if isinstance(x, (list, tuple)) and x else x
    is_double = isinstance(first, torch.Tensor) and first.dtype == torch.float64
    return torch.float64 if is_double else torch.float32


def as_list(name: str, value: Tensors | None, group: RankGroup, is_traced: bool = False) -> list[torch.Tensor]:
    """Returns tensors as a list, one per rank of this process. Raises ValueError unless each can be used."""
    if group.takes_lists:
        if not isinstance(value, (list, tuple)) or len(value) != len(group.ranks):
            got = f"{len(value)} items" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
            raise ValueError(
                f"{name} is {got}, must be a list of {len(group.ranks)} tensors, one per rank of the LocalCluster"
            )
        tensors = list(value)
    else:
        tensors = [value]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.device != group.device:
            raise ValueError(f"{name} is on {tensor.device}, must be on {group.device}, where the buffer is")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise ValueError(f"{name} is a {'nested' if tensor.is_nested else tensor.layout} tensor, must be strided")
        if not is_traced and (isinstance(tensor, FakeTensor) or (tensor.data_ptr() == 0 and tensor.numel() > 0)):
            raise ValueError(f"{name} is a {type(tensor).__name__} without memory, must have memory")
        if not is_traced and (tensor.is_neg() or tensor.is_conj()):
            raise ValueError(f"{name} is a view that negates or conjugates lazily, must be resolved: resolve_neg()")
        if not is_traced and forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(f"{name} has a tangent, must have none: only the backward pass is differentiated")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, must be contiguous"
            )
    _check_alike(f"{name} is", [tensor.dtype for tensor in tensors])
    return tensors


def _check_alike(what: str, values: Sequence[object]) -> None:
    for value in values:
        if value != values[0]:
            raise ValueError(f"{what} {values[0]} on one rank and {value} on another, must be equal")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype], meaning: str = "") -> None:
    """Raises ValueError unless the tensor's dtype is allowed. meaning: as in `check_weights`."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, must be one of {', '.join(map(str, allowed))}{meaning}")


def check_alignment(group: RankGroup, expert_alignment: int) -> None:
    require_int("expert_alignment", expert_alignment, 1, MAX_PADDED_ROWS // group.num_local_experts)


def check_num_tokens(group: RankGroup, topk_idx: Sequence[torch.Tensor], expert_alignment: int) -> None:
    """Raises ValueError if the rows of a rank that receives every token, with this many on each rank, exceed int32.

    Leaves room for a loop that runs up to a warp beyond the last row.
    """
    local_experts = group.num_local_experts
    rows = MAX_ROWS - 64 - local_experts * (expert_alignment - 1)
    most = rows // (group.topology.world_size * min(topk_idx[0].shape[1], local_experts))
    for idx in topk_idx:
        if idx.shape[0] > most:
            raise ValueError(
                f"topk_idx has {idx.shape[0]} tokens, must have at most {most}: a rank may be sent {rows} rows"
            )


def _check_promise(group: RankGroup, topk_idx: Sequence[torch.Tensor], max_tokens: int | None, is_traced: bool) -> None:
    """Raises ValueError for more tokens than promised, which may be unknown while a call is traced."""
    promised, must = group.config.max_tokens, "must have at most Config.max_tokens"
    if max_tokens is not None:
        require_int("max_tokens", max_tokens, 1, MAX_ROWS)
        if promised is None:
            raise ValueError(f"max_tokens is {max_tokens}, must be None without Config.max_tokens")
        promised, must = max_tokens, "must have at most max_tokens"
    for idx in () if is_traced else topk_idx:
        if promised is not None and idx.shape[0] > promised:
            raise ValueError(f"topk_idx has {idx.shape[0]} tokens, {must} = {promised}")


def check_ids(ids: list[torch.Tensor]) -> None:
    check_dtype("topk_idx", ids[0], (torch.int64, torch.int32))
    for idx in ids:
        if idx.dim() != 2 or not 1 <= idx.shape[1] <= MAX_TOPK:
            flatten = ": topk_idx.reshape(-1, topk_idx.shape[-1])" if idx.dim() > 2 else ""
            raise ValueError(
                f"topk_idx has shape {tuple(idx.shape)}, must be [T, K] with 1 <= K <= {MAX_TOPK}{flatten}"
            )
    _check_alike("topk_idx has K =", [idx.shape[1] for idx in ids])


def check_payload(name: str, xs: list[torch.Tensor], rows: list[int], is_traced: bool = False) -> None:
    check_dtype(name, xs[0], PAYLOAD_DTYPES)
    for x, expected in zip(xs, rows, strict=True):
        if x.dim() > 2:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, must be [{expected}, H]: {name}.reshape(-1, {name}.shape[-1])"
            )
        if x.dim() == 2 and x.shape[1] >= 1 and is_traced:  # compares numbers that depend on data when the graph runs
            torch._check(x.shape[0] == expected)
        elif x.dim() != 2 or x.shape[1] < 1 or x.shape[0] != expected:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be [{expected}, H] with H >= 1")
        if x.shape[1] * x.element_size() > MAX_ROW_BYTES or (not is_traced and x.shape[0] > MAX_ROWS):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be smaller: {MAX_ROW_BYTES} bytes a row")
    _check_alike(f"{name} has H =", [x.shape[1] for x in xs])


def check_weights(
    name: str,
    weights: list[torch.Tensor] | None,
    shapes: Sequence[tuple[int, ...]],
    allowed: Sequence[torch.dtype],
    meaning: str = "",
) -> None:
    """Raises ValueError for weights of a wrong dtype or shape. meaning: explains the weights in the message."""
    if weights is None:
        return
    check_dtype(name, weights[0], allowed, meaning)
    for weight, shape in zip(weights, shapes, strict=True):
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, must be {shape}{meaning}")


def check_forward_dtype(forward_dtype: torch.dtype, x: torch.Tensor) -> None:
    if forward_dtype != torch.float8_e4m3fn:
        raise ValueError(f"forward_dtype is {forward_dtype}, must be torch.float8_e4m3fn or None")
    check_dtype("x with forward_dtype", x, tuple(float8.DTYPES))


def check_backward_dtype(backward_dtype: torch.dtype, x: torch.Tensor, weights: object) -> None:
    if backward_dtype not in float8.VALUE_DTYPES:
        allowed = ", ".join(map(str, float8.VALUE_DTYPES))
        raise ValueError(f"backward_dtype is {backward_dtype}, must be None or one of {allowed}")
    if weights is not None:
        raise ValueError(f"backward_dtype is {backward_dtype}, must be None with weights")
    check_dtype("x with backward_dtype", x, tuple(float8.DTYPES))


def check_scales(xs: list[torch.Tensor], scales: list[torch.Tensor] | None) -> None:
    is_float8 = xs[0].dtype == torch.float8_e4m3fn
    if (scales is not None) != is_float8:
        raise ValueError(
            f"scales must be given {'with' if is_float8 else 'only with'} x of torch.float8_e4m3fn, x is {xs[0].dtype}"
        )
    if scales is None:
        return
    check_dtype("scales", scales[0], SCALE_DTYPES)
    for x, scale in zip(xs, scales, strict=True):
        shape = (x.shape[0], -(-x.shape[1] // SCALE_BLOCK))
        if tuple(scale.shape) != shape:
            raise ValueError(
                f"scales has shape {tuple(scale.shape)}, must be {shape}: one per {SCALE_BLOCK} elements of x"
            )
