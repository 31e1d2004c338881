"""Checks the arguments of low-latency calls, and plans the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ep.buffer.arguments import (
    MAX_PADDED_ROWS,
    WEIGHT_DTYPES,
    WEIGHTS_OF_ROWS,
    Tensors,
    as_list,
    as_taken,
    check_alignment,
    check_dtype,
    check_ids,
    check_payload,
    check_summable,
    check_weights,
    weight_dtype,
)
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import MAX_ROWS, require_int, require_one_of
from megatron_ep.low_latency.calls import LowLatencyCalls
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.plans import CombinePlan, DispatchPlan
from megatron_ep.low_latency.rows import Float8, float8_of
from megatron_ep.normal import expert_ids
from megatron_ep.normal.autograd import need_gradient
from megatron_ep.normal.one_hop import row_format

LAYOUTS = ("masked", "grouped")
PLACES = ("token", "expert")


def check_dispatch(
    calls: LowLatencyCalls, tensors: tuple[Any, ...], settings: tuple[Any, ...]
) -> tuple[DispatchPlan, list[tuple[Any, ...]], bool]:
    """Returns the plan, each rank's tensors as they are used, and whether a gradient is needed. Raises ValueError for
    invalid arguments; values of topk_idx are not checked."""
    group, limits = calls.group, calls.ranks
    x, topk_idx, topk_weights, scales, recv_rows, recv_wait_ns = tensors
    x, topk_idx, scales = as_taken(x), as_taken(topk_idx), as_taken(scales)
    topk_weights = as_taken(topk_weights, torch.float32)
    layout, expert_alignment, expert_capacity, max_recv_tokens, fp8, scale_layout = settings
    require_one_of("layout", layout, LAYOUTS)
    xs, ids = as_list("x", x, group), as_list("topk_idx", topk_idx, group)
    weights = None if topk_weights is None else as_list("topk_weights", topk_weights, group)
    check_ids(ids)
    topk, num_tokens = ids[0].shape[1], [idx.shape[0] for idx in ids]
    if topk > limits.largest.topk:
        raise ValueError(f"topk_idx has K = {topk}, must be at most the {limits.largest.topk} of LowLatency")
    for tokens in num_tokens:
        if tokens > limits.max_tokens:
            raise ValueError(f"x has {tokens} tokens, must have at most max_tokens = {limits.max_tokens}")
    row_scales = None if scales is None else as_list("scales", scales, group)
    check_payload("x", xs, num_tokens)
    float8 = float8_of(xs, fp8, row_scales, scale_layout)
    _check_row(calls, "x", xs[0], float8)
    check_weights("topk_weights", weights, [(tokens, topk) for tokens in num_tokens], WEIGHT_DTYPES)
    _check_counters(group, recv_rows=recv_rows, recv_wait_ns=recv_wait_ns)
    plan = calls.plan(
        xs,
        topk,
        ids[0].element_size(),
        weights,
        float8,
        masked=layout == "masked",
        expert_alignment=expert_alignment,
        rows=_rows(calls, layout, topk, expert_alignment, max_recv_tokens, expert_capacity),
    )
    needs_gradient = need_gradient(xs, weights)
    if needs_gradient and float8 is None:
        check_summable("the gradient of x", xs[0].dtype, group.device.type)
    elif needs_gradient and float8 is not None and float8.scale_format and any(x.requires_grad for x in xs):
        _check_row(calls, "the gradient of x", xs[0])  # in x's dtype
    return plan, _of_ranks(group, (x, topk_idx, topk_weights, scales, recv_rows, recv_wait_ns)), needs_gradient


def check_combine(
    handle: LowLatencyHandle,
    tensors: tuple[Any, ...],
    topk_weights: Tensors | None,
    row_weights: Tensors | None,
    sum_at: str,
    renormalize: bool,
) -> tuple[CombinePlan, list[tuple[Any, ...]], bool]:
    """Returns as `check_dispatch` does; tensors of rows keep their shape, [L, W * max_tokens, ...] or [R, ...]."""
    calls, group, made_by = handle.calls, handle.group, handle.plan
    x, *_, out, recv_wait_ns = tensors
    topk_weights, row_weights = (as_taken(weights, weight_dtype(x)) for weights in (topk_weights, row_weights))
    x = as_taken(x)
    if not isinstance(renormalize, bool):
        raise ValueError(f"renormalize is {renormalize!r}, must be True or False")
    require_one_of("sum_at", sum_at, PLACES)
    if row_weights is not None and sum_at == "token":
        raise ValueError("row_weights is given, must be None with topk_weights and sum_at='token'")
    if topk_weights is not None and sum_at == "expert":
        raise ValueError("topk_weights is given, must be None with row_weights and sum_at='expert'")
    rows = as_list("x", x, group)
    xs = _flat("x", rows, handle, 1)
    check_summable("x", xs[0].dtype, group.device.type)
    check_payload("x", xs, [made_by.rows] * len(xs))
    _check_row(calls, "x", xs[0])
    factors = outs = None
    if row_weights is not None:
        factors = as_list("row_weights", row_weights, group)
        flat, shapes = _flat("row_weights", factors, handle, 0, WEIGHTS_OF_ROWS), [(made_by.rows,)] * len(xs)
        check_weights("row_weights", flat, shapes, (weight_dtype(xs),), WEIGHTS_OF_ROWS)
    elif topk_weights is not None:
        factors, meaning = (
            as_list("topk_weights", topk_weights, group),
            ": one for each choice of a token, as of dispatch",
        )
        of_tokens = [(tokens, handle.topk) for tokens in made_by.num_tokens]
        check_weights("topk_weights", factors, of_tokens, (weight_dtype(xs),), meaning)
    if out is not None:
        outs = as_list("out", out, group)
        for tensor, of_rank, tokens in zip(outs, xs, made_by.num_tokens, strict=True):
            check_dtype("out", tensor, (of_rank.dtype,))
            if tuple(tensor.shape) != (tokens, of_rank.shape[1]):
                raise ValueError(f"out has shape {tuple(tensor.shape)}, must be {(tokens, of_rank.shape[1])}")
    _check_counters(group, recv_wait_ns=recv_wait_ns)
    plan = calls.plan_combine(handle, xs[0], None, sum_at_expert=sum_at == "expert", renormalize=renormalize)
    needs_gradient = need_gradient(rows, factors)
    if outs is not None and (needs_gradient or need_gradient(outs)):
        raise ValueError("out must not be given where a gradient is needed")
    if renormalize and (calls.masks is None or topk_weights is None):
        raise ValueError(
            "renormalize is True, must be False unless on_dead_rank is 'mask' and weights are given at the token"
        )
    if renormalize and needs_gradient:
        raise ValueError("renormalize is True, must be False where a gradient is needed")
    weights = topk_weights if row_weights is None else row_weights
    return plan, _of_ranks(group, (x, None, weights, out, recv_wait_ns)), needs_gradient


def check_id_values(group: RankGroup, inputs: Sequence[tuple[Any, ...]]) -> None:
    """Raises ValueError for invalid ids. inputs: tensors of a dispatch of each rank."""
    for rank, (_, idx, *_) in zip(group.ranks, inputs, strict=True):
        expert_ids.check(idx, group.config.num_experts, rank if len(inputs) > 1 else None)


def _of_ranks(group: RankGroup, tensors: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Returns the tensors of each rank of this process."""
    if not group.takes_lists:
        return [tensors]
    return [tuple(None if value is None else value[i] for value in tensors) for i in range(len(group.ranks))]


def _check_counters(group: RankGroup, **tensors: Tensors | None) -> None:
    shape = (group.topology.world_size,)
    for name, given in tensors.items():
        for tensor in () if given is None else as_list(name, given, group):
            if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, must be torch.int64 of shape {shape}"
                )


def _check_row(calls: LowLatencyCalls, name: str, x: torch.Tensor, float8: Float8 | None = None) -> None:
    largest, kind = calls.ranks.largest, str(x.dtype)
    if float8 is None:
        fits = x.shape[1] * x.element_size() <= calls.row_bytes
    else:
        row = row_format(largest.topk, x.shape[1], torch.float8_e4m3fn, float8.scale_dtype)
        fits, kind = row.slot_bytes <= largest.slot_bytes, "torch.float8_e4m3fn and their scales"
    if not fits:
        raise ValueError(
            f"{name} has rows of {x.shape[1]} x {kind}, must have at most the {calls.row_bytes} bytes of LowLatency's "
            "hidden and dtype"
        )


def _rows(
    calls: LowLatencyCalls,
    layout: str,
    topk: int,
    expert_alignment: int,
    max_recv_tokens: int | None,
    expert_capacity: int | None,
) -> int:
    """Returns the number of rows that a rank has room for. Raises ValueError for options of the other layout."""
    group, max_tokens = calls.group, calls.ranks.max_tokens
    world, local_experts = group.topology.world_size, group.num_local_experts
    check_alignment(group, expert_alignment)
    if layout == "masked":
        if expert_alignment != 1 or max_recv_tokens is not None:
            raise ValueError(
                f"expert_alignment is {expert_alignment} and max_recv_tokens {max_recv_tokens}, must be left out "
                "with layout 'masked'"
            )
        if expert_capacity is None:
            return local_experts * world * max_tokens
        require_int("expert_capacity", expert_capacity, 1, MAX_PADDED_ROWS // local_experts)
        return local_experts * expert_capacity
    if expert_capacity is not None:
        raise ValueError(f"expert_capacity is {expert_capacity}, must be left out with layout 'grouped'")
    if max_recv_tokens is not None:
        require_int("max_recv_tokens", max_recv_tokens, 1, MAX_ROWS)
        return max_recv_tokens
    return world * max_tokens * min(topk, local_experts) + local_experts * (expert_alignment - 1)


def _flat(
    name: str, tensors: list[torch.Tensor], handle: LowLatencyHandle, inner: int, meaning: str = ""
) -> list[torch.Tensor]:
    """Returns tensors with one dimension of rows and `inner` others. meaning: see `check_weights`."""
    if not handle.masked:
        return tensors
    flat, shape = [], handle.plan.shape
    for tensor in tensors:
        if tensor.dim() != 2 + inner or tuple(tensor.shape[:2]) != shape:
            allowed = ", ".join(map(str, shape)) + (", H" if inner else "")
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be [{allowed}]{meaning}")
        flat.append(tensor.flatten(0, 1))
    return flat
