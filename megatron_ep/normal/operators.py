"""Dispatch and combine as operators of torch.library, which `torch.compile` puts into a graph.

Operators take and return only tensors and numbers: a buffer is passed as its number, and a handle as its layout and the
two tables that dispatch fills. The compiler knows sizes that max_recv_tokens or expert_capacity fixes; others depend on
data.

Lists have one entry per rank of this process, and are empty for arguments that are not given. backward_of: see
`RankGroup.abort_peers_on_error`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from megatron_ep.buffer.interface import RowCounts
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import MAX_ROWS
from megatron_ep.diagnosis import failures
from megatron_ep.normal import autograd, launches
from megatron_ep.normal.handle import CountRequest, Handle, RankHandle
from megatron_ep.normal.row_counts import max_arrivals, max_rail_rows

ANY_STREAM = -1  # stream of a handle's tables that no launch is on, so that every launch keeps them

_LIBRARY = torch.library.Library("megatron_ep", "FRAGMENT")


def _operator(schema: str) -> Callable[[Callable[..., list[Tensor]]], Any]:
    """Registers a function as the operator of this schema, which is the result. `torch.library.custom_op` would check
    in each call that no output is an input.

    All ranks must make the same calls in the same order. A compiler may omit operators without effects if their results
    are unused, merge equal ones, and reorder independent ones by tensor sizes, which differ between ranks.
    """

    def register(run: Callable[..., list[Tensor]]) -> Any:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        operator = getattr(torch.ops.megatron_ep, name).default
        _register_effectful_op(operator, _EffectType.ORDERED)
        return operator

    return register


def _fake(name: str) -> Callable[[Callable[..., list[Tensor]]], Any]:
    """Registers what the compiler runs in place of an operator."""
    return torch.library.register_fake(f"megatron_ep::{name}", lib=_LIBRARY)


def _group(number: int) -> RankGroup:
    group = failures.group_of(number)
    if not isinstance(group, RankGroup):
        raise ValueError("buffer is closed")
    return group


def _handle(
    group: RankGroup,
    num_tokens: Sequence[int],
    rows: Sequence[int],
    counts: Sequence[Tensor],
    layouts: Sequence[Tensor],
    dst_rows: Sequence[Tensor],
    rails: Sequence[Tensor],
) -> Handle:
    """Builds a handle from its tensors. counts: tokens_per_expert, or any tensors if they are not read."""
    topk = dst_rows[0].shape[1]
    ranks = [
        RankHandle(
            topk,
            RowCounts(num_tokens[i], rows[i], dst_rows[i].shape[0], rails[i].shape[0]),
            layouts[i],
            counts[i],
            ANY_STREAM,
            dst_rows=dst_rows[i],
            rail_experts=rails[i],
            has_tables=True,
        )
        for i in range(len(layouts))
    ]
    return Handle(group, topk, ranks)


# ---- dispatch


@_operator(
    "dispatch(Tensor[] x, Tensor[] topk_idx, Tensor[] weights, Tensor[] scales, int buffer, int expert_alignment, "
    "int expert_capacity, SymInt max_recv_tokens, bool clears_end) -> Tensor[]",
)
def dispatch_op(
    x: list[Tensor],
    topk_idx: list[Tensor],
    weights: list[Tensor],
    scales: list[Tensor],
    buffer: int,
    expert_alignment: int,
    expert_capacity: int,
    max_recv_tokens: int,
    clears_end: bool,
) -> list[Tensor]:
    """Returns rows, their weights and scales, counts, layouts, dst_rows, rails. max_recv_tokens: 0 for none."""
    group = _group(buffer)
    launches.check_capture(group, max_recv_tokens or None)
    with group.abort_peers_on_error():
        group.check_usable()
        request = CountRequest(expert_alignment, expert_capacity, max_recv_tokens or None, has_fixed_sizes=True)
        handle = Handle(group, topk_idx[0].shape[1], [], request, topk_idx)
        out, out_scales, out_weights = launches.launch_dispatch(
            handle, x, scales or None, weights or None, clears_end=clears_end
        )
    ranks = handle.ranks
    return [
        *out,
        *(out_weights or ()),
        *(out_scales or ()),
        *(rank.tokens_per_expert for rank in ranks),
        *(rank.layout for rank in ranks),
        *(rank.dst_rows for rank in ranks),
        *(rank.rail_experts for rank in ranks),
    ]


@_fake("dispatch")
def _(
    x: list[Tensor],
    topk_idx: list[Tensor],
    weights: list[Tensor],
    scales: list[Tensor],
    buffer: int,
    expert_alignment: int,
    expert_capacity: int,
    max_recv_tokens: int,
    clears_end: bool,
) -> list[Tensor]:
    group, context = _group(buffer), torch.library.get_ctx()
    topk, is_fixed = topk_idx[0].shape[1], not (isinstance(max_recv_tokens, int) and max_recv_tokens == 0)
    counts, layouts, dst_rows, rails = [], [], [], []
    rows: list[Any] = []  # numbers, known or not
    received: Any
    rail: Any
    for idx in topk_idx:
        num_tokens = idx.shape[0]
        if is_fixed:
            received = max_arrivals(max_recv_tokens, expert_capacity, num_tokens, group.topology.world_size)
            rail = max_rail_rows(group.topology, max_recv_tokens, received, num_tokens)
            rows.append(max_recv_tokens)
        else:
            received = context.new_dynamic_size(max=MAX_ROWS)
            rail = context.new_dynamic_size(max=MAX_ROWS) if group.topology.nodes > 1 else 0
            rows.append(
                expert_capacity * group.num_local_experts if expert_capacity else context.new_dynamic_size(max=MAX_ROWS)
            )
        counts_on = group.device if is_fixed else torch.device("cpu")
        counts.append(torch.empty(2, group.num_local_experts, dtype=torch.int64, device=counts_on))
        # The size is a constant plus a term proportional to the tokens, see csrc/core/layout.h.
        size = group.heap.layout_size(0, topk) + 2 * num_tokens * topk
        layouts.append(idx.new_empty(size, dtype=torch.int32))
        dst_rows.append(idx.new_empty(received, topk, dtype=torch.int32))
        rails.append(idx.new_empty(rail, topk, dtype=torch.int32))
    return [*_fake_rows(x, weights, scales, rows), *counts, *layouts, *dst_rows, *rails]


def _fake_rows(x: list[Tensor], weights: list[Tensor], scales: list[Tensor], rows: Sequence[int]) -> list[Tensor]:
    return [
        *(t.new_empty(count, t.shape[1]) for t, count in zip(x, rows, strict=True)),
        *(t.new_empty(count) for t, count in zip(weights, rows[: len(weights)], strict=True)),
        *(t.new_empty(count, t.shape[1]) for t, count in zip(scales, rows[: len(scales)], strict=True)),
    ]


@_operator(
    "dispatch_again(Tensor[] x, Tensor[] weights, Tensor[] scales, Tensor[] layouts, Tensor[] dst_rows, "
    "Tensor[] rails, int buffer, SymInt[] rows, bool clears_end, str backward_of) -> Tensor[]",
)
def dispatch_again_op(
    x: list[Tensor],
    weights: list[Tensor],
    scales: list[Tensor],
    layouts: list[Tensor],
    dst_rows: list[Tensor],
    rails: list[Tensor],
    buffer: int,
    rows: Sequence[int],
    clears_end: bool,
    backward_of: str,
) -> list[Tensor]:
    """Dispatches with the layout of an earlier dispatch. Returns rows, their weights and scales."""
    group = _group(buffer)
    with group.abort_peers_on_error(backward_of):
        group.check_usable()
        handle = _handle(group, [t.shape[0] for t in x], rows, layouts, layouts, dst_rows, rails)
        out, out_scales, out_weights = launches.launch_dispatch(
            handle, x, scales or None, weights or None, clears_end=clears_end
        )
    return [*out, *(out_weights or ()), *(out_scales or ())]


@_fake("dispatch_again")
def _(
    x: list[Tensor],
    weights: list[Tensor],
    scales: list[Tensor],
    layouts: list[Tensor],
    dst_rows: list[Tensor],
    rails: list[Tensor],
    buffer: int,
    rows: Sequence[int],
    *_: Any,
) -> list[Tensor]:
    return _fake_rows(x, weights, scales, rows)


# ---- combine


@_operator(
    "combine(Tensor[] x, Tensor[] weights, Tensor[] row_weights, Tensor[] layouts, Tensor[] dst_rows, "
    "Tensor[] rails, int buffer, SymInt[] num_tokens, str backward_of) -> Tensor[]",
)
def combine_op(
    x: list[Tensor],
    weights: list[Tensor],
    row_weights: list[Tensor],
    layouts: list[Tensor],
    dst_rows: list[Tensor],
    rails: list[Tensor],
    buffer: int,
    num_tokens: Sequence[int],
    backward_of: str,
) -> list[Tensor]:
    """Combines x. Returns sums [T, H], and weights [T, K] if weights [R] are given; row_weights [R] multiply x."""
    group = _group(buffer)
    with group.abort_peers_on_error(backward_of):
        group.check_usable()
        handle = _handle(group, num_tokens, [t.shape[0] for t in x], layouts, layouts, dst_rows, rails)
        out, out_weights = launches.launch_combine(handle, x, weights or None, row_weights or None)
    return [*out, *(out_weights or ())]


@_fake("combine")
def _(
    x: list[Tensor],
    weights: list[Tensor],
    row_weights: list[Tensor],
    layouts: list[Tensor],
    dst_rows: list[Tensor],
    rails: list[Tensor],
    buffer: int,
    num_tokens: Sequence[int],
    *_: Any,
) -> list[Tensor]:
    topk = dst_rows[0].shape[1]
    return [
        *(t.new_empty(tokens, t.shape[1]) for t, tokens in zip(x, num_tokens, strict=True)),
        *(t.new_empty(tokens, topk) for t, tokens in zip(weights, num_tokens[: len(weights)], strict=True)),
    ]


# ---- gradients: a dispatch's is a combine, a combine's is a dispatch


def _keep(ctx: Any, x: list[Tensor], weights: list[Tensor], buffer: int, tables: Sequence[Tensor]) -> None:
    ctx.buffer, ctx.has_weights, ctx.sizes = buffer, bool(weights), [t.shape[0] for t in x]
    ctx.save_for_backward(*tables)


def _parts(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    return [list(tensors[i : i + count]) for i in range(0, len(tensors), count)]


def _bring_back(ctx: Any, grads: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of the x and the weights that a dispatch sent."""
    n = len(ctx.sizes)
    rows = list(map(autograd.empty_rows if ctx.is_float8 else autograd.in_memory, grads[:n]))
    weights = [autograd.in_memory(grad) for grad in grads[n : 2 * n]] if ctx.has_weights else []
    back = combine_op(rows, weights, [], *_parts(ctx.saved_tensors, n), ctx.buffer, ctx.sizes, "dispatch")
    return ([None] * n if ctx.is_float8 else back[:n]), back[n:]


def _setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, _, weights, scales, buffer, *_ = inputs
    _keep(ctx, x, weights, buffer, output[len(output) - 3 * len(x) :])
    ctx.is_float8, ctx.num_scales = x[0].dtype == torch.float8_e4m3fn, len(scales)


def _dispatch_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, weights = _bring_back(ctx, grads)
    return x, [None] * len(x), weights, [None] * ctx.num_scales, None, None, None, None, None


def _setup_dispatch_again(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, scales, layouts, dst_rows, rails, buffer, *_ = inputs
    _keep(ctx, x, weights, buffer, (*layouts, *dst_rows, *rails))
    ctx.is_float8, ctx.num_scales = x[0].dtype == torch.float8_e4m3fn, len(scales)


def _dispatch_again_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, weights = _bring_back(ctx, grads)
    none = [None] * len(x)
    return x, weights, [None] * ctx.num_scales, none, none, none, None, None, None, None


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, row_weights, layouts, dst_rows, rails, buffer, *_ = inputs
    kept = (*x, *row_weights) if row_weights else ()
    _keep(ctx, x, weights, buffer, (*layouts, *dst_rows, *rails, *kept))


def _combine_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    n, topk = len(ctx.sizes), ctx.saved_tensors[len(ctx.sizes)].shape[1]
    layouts, dst_rows, rails, *kept = _parts(ctx.saved_tensors, n)
    grads, none = list(map(autograd.in_memory, grads)), [None] * n
    beside = [autograd.row_marks(grad, topk) for grad in grads] if kept else grads[n:]
    back = dispatch_again_op(grads[:n], beside, [], layouts, dst_rows, rails, ctx.buffer, ctx.sizes, True, "combine")
    rows, weights, row_weights = back[:n], back[n:], []
    if kept:
        given = list(zip(*kept, rows, (mark != 0 for mark in weights), strict=True))
        rows = [launches.gradient_of_rows(*part) for part in given]
        row_weights, weights = [launches.gradient_of_weights(*part) for part in given], []
    return rows, weights, row_weights, none, none, none, None, None, None


for _name, _backward, _setup in (
    ("dispatch", _dispatch_backward, _setup_dispatch),
    ("dispatch_again", _dispatch_again_backward, _setup_dispatch_again),
    ("combine", _combine_backward, _setup_combine),
):
    torch.library.register_autograd(f"megatron_ep::{_name}", _backward, setup_context=_setup, lib=_LIBRARY)


# ---- traced calls


def traced_dispatch(
    handle: Handle,
    x: Sequence[Tensor],
    scales: Sequence[Tensor] | None,
    weights: Sequence[Tensor] | None,
    *,
    clears_end: bool,
) -> tuple[list[Tensor], Handle]:
    """Dispatches like `autograd.differentiable_dispatch` by operators; also returns the handle with its tensors."""
    n, number, request = len(x), handle.group.number, handle.request
    beside = (list(weights or ()), list(scales or ()))
    if request is None:
        rows = [rank.rows for rank in handle.ranks]
        return dispatch_again_op(list(x), *beside, *_tables_of(handle), number, rows, clears_end, ""), handle
    out = dispatch_op(
        list(x),
        list(handle.topk_idx),
        *beside,
        number,
        request.expert_alignment,
        request.expert_capacity,
        request.max_recv_tokens or 0,
        clears_end,
    )
    *_, counts, layouts, dst_rows, rails = _parts(out, n)
    made = _handle(
        handle.group, [t.shape[0] for t in x], [t.shape[0] for t in out[:n]], counts, layouts, dst_rows, rails
    )
    return out[: len(out) - 4 * n], made


def traced_combine(handle: Handle, x: Sequence[Tensor], row_weights: Sequence[Tensor] | None) -> list[Tensor]:
    """Combines like `autograd.differentiable_combine`, or with row_weights like `autograd.WeightedCombineFunction`."""
    num_tokens = [rank.num_tokens for rank in handle.ranks]
    return combine_op(list(x), [], list(row_weights or ()), *_tables_of(handle), handle.group.number, num_tokens, "")


def _tables_of(handle: Handle) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    ranks = handle.ranks
    return [rank.layout for rank in ranks], [rank.dst_rows for rank in ranks], [rank.rail_experts for rank in ranks]
