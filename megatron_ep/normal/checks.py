"""Checks the arguments of dispatch and combine, and raises ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ep import float8
from megatron_ep.buffer.any_buffer import AnyBuffer, rank_group_of
from megatron_ep.buffer.arguments import (
    MAX_PADDED_ROWS,
    WEIGHT_DTYPES,
    WEIGHTS_OF_ROWS,
    as_list,
    as_taken,
    check_alignment,
    check_dtype,
    check_ids,
    check_num_tokens,
    check_payload,
    check_scales,
    check_summable,
    check_weights,
    weight_dtype,
)
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import MAX_ROWS, require_int, require_int_or_none, require_one_of
from megatron_ep.normal import autograd
from megatron_ep.normal import plan as plans
from megatron_ep.normal.handle import Handle


def group_of(buffer: AnyBuffer | None, handle: Handle | None) -> RankGroup:
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


def check_dispatch(
    group: RankGroup, handle: Handle | None, tensors: tuple[Any, ...], settings: tuple[Any, ...], *, is_traced: bool
) -> tuple[Any, Any, Any, Any, bool]:
    """Returns the lists of x, topk_idx, topk_weights and scales as they are used, and whether a gradient is needed.

    tensors: x, topk_idx, topk_weights and scales. settings: in the order of `plan.DEFAULTS`.
    """
    if handle is not None and handle.group is not group:
        raise ValueError("handle belongs to another buffer than the one given")
    expert_alignment, expert_capacity, max_recv_tokens, layout, max_tokens = settings
    x, topk_idx, topk_weights, scales = tensors
    x, topk_idx, scales = as_taken(x), as_taken(topk_idx), as_taken(scales)
    topk_weights = as_taken(topk_weights, torch.float32)
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
    needs_gradient = autograd.need_gradient(xs, weights)
    if needs_gradient and xs[0].dtype != torch.float8_e4m3fn:
        check_summable("the gradient of x", xs[0].dtype, group.device.type)
    return xs, ids, weights, row_scales, needs_gradient


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


def check_capture(group: RankGroup, max_recv_tokens: int | None) -> None:
    """Raises ValueError if the host would wait for counts while a CUDA graph is captured. Does not notify other ranks,
    because all ranks capture alike."""
    backend = group.live_backend()
    if max_recv_tokens is None and not backend.host_knows_counts and backend.is_capturing():
        raise ValueError(
            "max_recv_tokens is None, must be given while a CUDA graph is captured: without it the host waits for "
            "counts that nothing exchanges yet"
        )


def check_combine(
    handle: Handle, x: Any, weights: Any, *, is_traced: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Returns the lists of x and weights as they are used."""
    group = handle.group
    x, weights = as_taken(x), as_taken(weights, weight_dtype(x))
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


def check_forward(forward_dtype: torch.dtype | None, forward_scales: str, x: torch.Tensor) -> None:
    require_one_of("forward_scales", forward_scales, float8.SCALE_FORMATS)
    if forward_dtype is None:
        if forward_scales != "fp32":
            raise ValueError(f"forward_scales is {forward_scales!r}, must be 'fp32' without forward_dtype")
        return
    if forward_dtype != torch.float8_e4m3fn:
        raise ValueError(f"forward_dtype is {forward_dtype}, must be torch.float8_e4m3fn or None")
    check_dtype("x with forward_dtype", x, tuple(float8.DTYPES))


def check_backward(backward_dtype: torch.dtype | None, x: torch.Tensor, weights: object) -> None:
    if backward_dtype is None:
        return
    if backward_dtype not in float8.VALUE_DTYPES:
        allowed = ", ".join(map(str, float8.VALUE_DTYPES))
        raise ValueError(f"backward_dtype is {backward_dtype}, must be None or one of {allowed}")
    if weights is not None:
        raise ValueError(f"backward_dtype is {backward_dtype}, must be None with weights")
    check_dtype("x with backward_dtype", x, tuple(float8.DTYPES))
