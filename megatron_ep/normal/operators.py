"""Dispatch and combine as operators of torch.library, which `torch.compile` puts into a graph.

Operators take and return only tensors and numbers: a buffer is passed as its number, and a handle as its layout and the
two tables that dispatch fills, in one list of all ranks' layouts, dst_rows and rail_experts. The compiler knows sizes
that max_recv_tokens or expert_capacity fixes; others depend on data.

Lists have one entry per rank of this process, and are empty for arguments that are not given. backward_of: see
`RankGroup.abort_peers_on_error`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import CheckpointPolicy

from megatron_ep.buffer.interface import RowCounts
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import MAX_ROWS
from megatron_ep.diagnosis import failures
from megatron_ep.normal import autograd, cached_plans, checks
from megatron_ep.normal.handle import CountRequest, Handle, RankHandle
from megatron_ep.normal.row_counts import max_arrivals, max_rail_rows

Tensors = list[Tensor]

ANY_STREAM = -1  # stream of a handle's tables that no launch is on, so that every launch keeps them

_LIBRARY = torch.library.Library("megatron_ep", "FRAGMENT")


def _operator(schema: str) -> Callable[[Callable[..., Tensors]], Any]:
    """Registers a function as the operator of this schema, which is the result. `torch.library.custom_op` would check
    in each call that no output is an input.

    All ranks must make the same calls in the same order. A compiler may omit operators without effects if their results
    are unused, merge equal ones, and reorder independent ones by tensor sizes, which differ between ranks.
    """

    def register(run: Callable[..., Tensors]) -> Any:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        operator = getattr(torch.ops.megatron_ep, name).default
        _register_effectful_op(operator, _EffectType.ORDERED)
        return operator

    return register


def _fake(name: str) -> Callable[[Callable[..., Tensors]], Any]:
    """Registers what the compiler runs in place of an operator."""
    return torch.library.register_fake(f"megatron_ep::{name}", lib=_LIBRARY)


def _group(number: int) -> RankGroup:
    group = failures.group_of(number)
    if not isinstance(group, RankGroup):
        raise ValueError("buffer is closed")
    return group


def _handle(
    group: RankGroup, num_tokens: Sequence[int], rows: Sequence[int], tables: Tensors, counts: Tensors | None = None
) -> Handle:
    """Builds a handle from its tensors. counts: tokens_per_expert; None if they are not read."""
    layouts, dst_rows, rails = _parts(tables, len(rows))
    counts, topk = counts or layouts, dst_rows[0].shape[1]
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
    x: Tensors,
    topk_idx: Tensors,
    weights: Tensors,
    scales: Tensors,
    buffer: int,
    expert_alignment: int,
    expert_capacity: int,
    max_recv_tokens: int,
    clears_end: bool,
) -> Tensors:
    """Returns rows, their weights and scales, counts and tables. max_recv_tokens: 0 for none."""
    group = _group(buffer)
    checks.check_capture(group, max_recv_tokens or None)
    with group.abort_peers_on_error():
        group.check_usable()
        request = CountRequest(expert_alignment, expert_capacity, max_recv_tokens or None, has_fixed_sizes=True)
        handle = Handle(group, topk_idx[0].shape[1], [], request, topk_idx)
        out, out_scales, out_weights = cached_plans.launch_dispatch(
            handle, x, scales or None, weights or None, clears_end=clears_end
        )
    counts = [rank.tokens_per_expert for rank in handle.ranks]
    return [*out, *(out_weights or ()), *(out_scales or ()), *counts, *_tables_of(handle)]


@_fake("dispatch")
def _(
    x: Tensors,
    topk_idx: Tensors,
    weights: Tensors,
    scales: Tensors,
    buffer: int,
    expert_alignment: int,
    expert_capacity: int,
    max_recv_tokens: int,
    clears_end: bool,
) -> Tensors:
    group, context = _group(buffer), torch.library.get_ctx()
    topk, is_fixed = topk_idx[0].shape[1], not (isinstance(max_recv_tokens, int) and max_recv_tokens == 0)
    counts, layouts, dst_rows, rails = [], [], [], []
    rows: list[Any] = []  # numbers, known or not
    received: Any
    rail: Any
    for idx in topk_idx:
        num_tokens = idx.shape[0]
        if is_fixed:
            received = max_arrivals(group, max_recv_tokens, expert_capacity, num_tokens)
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
        size = group.heap.layout(0, topk)["size"] + 2 * num_tokens * topk
        layouts.append(idx.new_empty(size, dtype=torch.int32))
        dst_rows.append(idx.new_empty(received, topk, dtype=torch.int32))
        rails.append(idx.new_empty(rail, topk, dtype=torch.int32))
    return [*_fake_rows(x, weights, scales, rows), *counts, *layouts, *dst_rows, *rails]


def _fake_rows(x: Tensors, weights: Tensors, scales: Tensors, rows: Sequence[int]) -> Tensors:
    return [
        *(t.new_empty(count, t.shape[1]) for t, count in zip(x, rows, strict=True)),
        *(t.new_empty(count) for t, count in zip(weights, rows[: len(weights)], strict=True)),
        *(t.new_empty(count, t.shape[1]) for t, count in zip(scales, rows[: len(scales)], strict=True)),
    ]


@_operator(
    "dispatch_again(Tensor[] x, Tensor[] weights, Tensor[] scales, Tensor[] tables, int buffer, SymInt[] rows, "
    "bool clears_end, str backward_of) -> Tensor[]",
)
def dispatch_again_op(
    x: Tensors,
    weights: Tensors,
    scales: Tensors,
    tables: Tensors,
    buffer: int,
    rows: Sequence[int],
    clears_end: bool,
    backward_of: str,
) -> Tensors:
    """Dispatches with the layout of an earlier dispatch. Returns rows, their weights and scales."""
    group = _group(buffer)
    with group.abort_peers_on_error(backward_of):
        group.check_usable()
        handle = _handle(group, [t.shape[0] for t in x], rows, tables)
        out, out_scales, out_weights = cached_plans.launch_dispatch(
            handle, x, scales or None, weights or None, clears_end=clears_end
        )
    return [*out, *(out_weights or ()), *(out_scales or ())]


@_fake("dispatch_again")
def _(
    x: Tensors, weights: Tensors, scales: Tensors, tables: Tensors, buffer: int, rows: Sequence[int], *_: Any
) -> Tensors:
    return _fake_rows(x, weights, scales, rows)


# ---- combine


@_operator(
    "combine(Tensor[] x, Tensor[] weights, Tensor[] row_weights, Tensor[] tables, int buffer, SymInt[] num_tokens, "
    "str backward_of) -> Tensor[]",
)
def combine_op(
    x: Tensors,
    weights: Tensors,
    row_weights: Tensors,
    tables: Tensors,
    buffer: int,
    num_tokens: Sequence[int],
    backward_of: str,
) -> Tensors:
    """Combines x. Returns sums [T, H], and weights [T, K] if weights [R] are given; row_weights [R] multiply x."""
    group = _group(buffer)
    with group.abort_peers_on_error(backward_of):
        group.check_usable()
        handle = _handle(group, num_tokens, [t.shape[0] for t in x], tables)
        out, out_weights = cached_plans.launch_combine(handle, x, weights or None, row_weights or None)
    return [*out, *(out_weights or ())]


@_fake("combine")
def _(
    x: Tensors, weights: Tensors, row_weights: Tensors, tables: Tensors, buffer: int, num_tokens: Sequence[int], *_: Any
) -> Tensors:
    topk = tables[len(x)].shape[1]  # dst_rows
    return [
        *(t.new_empty(tokens, t.shape[1]) for t, tokens in zip(x, num_tokens, strict=True)),
        *(t.new_empty(tokens, topk) for t, tokens in zip(weights, num_tokens[: len(weights)], strict=True)),
    ]


# ---- gradients: a dispatch's is a combine, a combine's is a dispatch


def _save_results(operator: Any) -> None:
    """Lets a compiled checkpoint save the results of the call that is being traced, and not repeat it: torch orders
    calls with effects in a forward pass and in a backward pass, but cannot move one from the former to the latter.

    Raises ValueError if the checkpoint's policy says that the call must be repeated.
    """
    mode, traced = proxy_tensor.get_proxy_mode(), []
    for node in () if mode is None else reversed(mode.tracer.graph.nodes):
        traced.append(node)  # the call, which has a token beside it, or what it returns
        if operator in node.args[1:2]:
            break
    else:
        return
    for node in traced:
        if node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE:
            raise ValueError(
                f"the policy of a checkpoint inside torch.compile returns MUST_RECOMPUTE for {operator}, must return "
                "PREFER_RECOMPUTE or MUST_SAVE: a compiled graph cannot repeat it. Or compile inside the checkpoint"
            )
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _keep(ctx: Any, x: Tensors, weights: Tensors, scales: Tensors, buffer: int, tables: Sequence[Tensor]) -> None:
    ctx.buffer, ctx.has_weights, ctx.num_scales = buffer, bool(weights), len(scales)
    ctx.sizes, ctx.is_float8 = [t.shape[0] for t in x], x[0].dtype == torch.float8_e4m3fn
    ctx.save_for_backward(*tables)


def _parts(tensors: Sequence[Tensor], count: int) -> list[Tensors]:
    return [list(tensors[i : i + count]) for i in range(0, len(tensors), count)]


def _bring_back(ctx: Any, grads: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of the x and the weights that a dispatch sent."""
    n = len(ctx.sizes)
    # Float8 x gets no gradient, so that only weights are sent, with rows without elements.
    rows = [t.new_empty(t.shape[0], 0).float() if ctx.is_float8 else autograd.in_memory(t) for t in grads[:n]]
    weights = [autograd.in_memory(grad) for grad in grads[n : 2 * n]] if ctx.has_weights else []
    back = combine_op(rows, weights, [], list(ctx.saved_tensors), ctx.buffer, ctx.sizes, "dispatch")
    return ([None] * n if ctx.is_float8 else back[:n]), back[n:]


def _setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    _save_results(dispatch_op)
    x, _, weights, scales, buffer, *_ = inputs
    _keep(ctx, x, weights, scales, buffer, output[len(output) - 3 * len(x) :])


def _dispatch_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    x, weights = _bring_back(ctx, grads)
    return x, [None] * len(x), weights, [None] * ctx.num_scales, None, None, None, None, None


def _setup_dispatch_again(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    _save_results(dispatch_again_op)
    x, weights, scales, tables, buffer, *_ = inputs
    _keep(ctx, x, weights, scales, buffer, tables)


def _dispatch_again_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    x, weights = _bring_back(ctx, grads)
    return x, weights, [None] * ctx.num_scales, [None] * (3 * len(x)), None, None, None, None


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    _save_results(combine_op)
    x, weights, row_weights, tables, buffer, *_ = inputs
    _keep(ctx, x, weights, [], buffer, (*tables, *(x if row_weights else ()), *row_weights))


def _combine_backward(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
    n = len(ctx.sizes)
    tables, kept = list(ctx.saved_tensors[: 3 * n]), _parts(ctx.saved_tensors[3 * n :], n)
    grads, topk = list(map(autograd.in_memory, grads)), tables[n].shape[1]
    beside = [autograd.row_marks(grad, topk) for grad in grads] if kept else grads[n:]
    back = dispatch_again_op(grads[:n], beside, [], tables, ctx.buffer, ctx.sizes, True, "combine")
    rows, weights, row_weights = back[:n], back[n:], []
    if kept:
        given = list(zip(*kept, rows, (mark != 0 for mark in weights), strict=True))
        rows = [autograd.gradient_of_rows(*part) for part in given]
        row_weights, weights = [autograd.gradient_of_weights(*part) for part in given], []
    return rows, weights, row_weights, [None] * (3 * n), None, None, None


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
) -> tuple[Tensors, Handle]:
    """Dispatches like `autograd.differentiable_dispatch` by operators; also returns the handle with its tensors."""
    n, number, request = len(x), handle.group.number, handle.request
    beside = (list(weights or ()), list(scales or ()))
    if request is None:
        rows = [rank.rows for rank in handle.ranks]
        return dispatch_again_op(list(x), *beside, _tables_of(handle), number, rows, clears_end, ""), handle
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
    num_tokens, rows = [t.shape[0] for t in x], [t.shape[0] for t in out[:n]]
    made = _handle(handle.group, num_tokens, rows, out[-3 * n :], out[-4 * n : -3 * n])
    return out[: -4 * n], made


def traced_combine(handle: Handle, x: Sequence[Tensor], row_weights: Sequence[Tensor] | None) -> Tensors:
    """Combines like `autograd.differentiable_combine`, or with row_weights like `autograd.WeightedCombineFunction`."""
    num_tokens = [rank.num_tokens for rank in handle.ranks]
    return combine_op(list(x), [], list(row_weights or ()), _tables_of(handle), handle.group.number, num_tokens, "")


def _tables_of(handle: Handle) -> Tensors:
    ranks = handle.ranks
    return [
        *(rank.layout for rank in ranks),
        *(rank.dst_rows for rank in ranks),
        *(rank.rail_experts for rank in ranks),
    ]
