"""Checks the arguments of low-latency calls, and plans the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.rank_group import RankGroup, check_summable
from megatron_ep.config import MAX_ROWS, require_int
from megatron_ep.low_latency.calls import LowLatencyCalls
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.plans import CombinePlan, DispatchPlan
from megatron_ep.low_latency.rows import Float8, float8_of
from megatron_ep.normal import expert_ids
from megatron_ep.normal.api import (
    MAX_PADDED_ROWS,
    WEIGHT_DTYPES,
    WEIGHTS_OF_ROWS,
    Tensors,
    as_list,
    as_taken,
    check_dtype,
    check_ids,
    check_payload,
    check_weights,
    listed,
    weight_dtype,
)
from megatron_ep.normal.autograd import need_gradient
from megatron_ep.normal.one_hop import row_format

LAYOUTS = ("masked", "grouped")
PLACES = ("token", "expert")


@dataclass
class Limits:
    """Limits of a LowLatency's calls.

    row_bytes: bytes of `hidden` elements. largest: largest format of such rows, in its dtype or float8.
    """

    max_tokens: int
    topk: int
    row_bytes: int
    largest: _C.RowFormat


class Checks:
    """Checks the arguments of a LowLatency's calls, and makes their plans."""

    def __init__(self, group: RankGroup, limits: Limits, calls: LowLatencyCalls):
        self._group = group
        self._limits = limits
        self._calls = calls
        self.on_host = group.device.type == "cpu"

    def check_dispatch(
        self, tensors: tuple[Any, ...], settings: tuple[Any, ...]
    ) -> tuple[DispatchPlan, list[tuple[Any, ...]], bool]:
        """Returns the plan, each rank's tensors as they are used, and whether a gradient is needed. Raises ValueError
        for invalid arguments; values of topk_idx are not checked."""
        x, topk_idx, topk_weights, scales, *counters = tensors
        taken = (as_taken(x), as_taken(topk_idx), as_taken(topk_weights, torch.float32), as_taken(scales), *counters)
        plan = self._plan_dispatch(*taken, *settings)
        xs, weights = listed(taken[0], self._group), listed(taken[2], self._group)
        needs_gradient = need_gradient(xs, weights)
        if needs_gradient:
            self._check_gradient(plan, xs)
        return plan, self._of_ranks(taken), needs_gradient

    def _of_ranks(self, tensors: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Returns the tensors of each rank of this process."""
        if not self._group.takes_lists:
            return [tensors]
        ranks = range(len(self._group.ranks))
        return [tuple(None if value is None else value[i] for value in tensors) for i in ranks]

    def _plan_dispatch(
        self,
        x: Tensors,
        topk_idx: Tensors,
        topk_weights: Tensors | None,
        scales: Tensors | None,
        recv_rows: Tensors | None,
        recv_wait_ns: Tensors | None,
        layout: str,
        expert_alignment: int,
        expert_capacity: int | None,
        max_recv_tokens: int | None,
        fp8: str | None,
        scale_layout: str,
    ) -> DispatchPlan:
        group = self._group
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}, must be one of {', '.join(map(repr, LAYOUTS))}")
        xs, ids = as_list("x", x, group), as_list("topk_idx", topk_idx, group)
        weights = None if topk_weights is None else as_list("topk_weights", topk_weights, group)
        check_ids(ids)
        topk, num_tokens = ids[0].shape[1], [idx.shape[0] for idx in ids]
        if topk > self._limits.topk:
            raise ValueError(f"topk_idx has K = {topk}, must be at most the {self._limits.topk} of LowLatency")
        most = self._limits.max_tokens
        for tokens in num_tokens:
            if tokens > most:
                raise ValueError(f"x has {tokens} tokens, must have at most max_tokens = {most}")
        row_scales = None if scales is None else as_list("scales", scales, group)
        check_payload("x", xs, num_tokens)
        float8 = float8_of(xs, fp8, row_scales, scale_layout)
        self._check_row("x", xs[0], float8)
        check_weights("topk_weights", weights, [(tokens, topk) for tokens in num_tokens], WEIGHT_DTYPES)
        self._check_counters(recv_rows=recv_rows, recv_wait_ns=recv_wait_ns)
        rows = self._rows(layout, topk, expert_alignment, max_recv_tokens, expert_capacity)
        return self._calls.plan(
            xs,
            topk,
            ids[0].element_size(),
            weights,
            float8,
            masked=layout == "masked",
            expert_alignment=expert_alignment,
            rows=rows,
        )

    def _check_gradient(self, plan: DispatchPlan, xs: Sequence[torch.Tensor]) -> None:
        """Raises ValueError unless the gradient of a dispatch can be combined, in x's dtype even if rows become
        float8."""
        if plan.float8 is None:
            check_summable("the gradient of x", xs[0].dtype, self._group.device.type)
        elif plan.float8.scale_format and any(x.requires_grad for x in xs):
            self._check_row("the gradient of x", xs[0])

    def check_combine(
        self, handle: LowLatencyHandle, tensors: tuple[Any, ...], sum_at: str, renormalize: bool
    ) -> tuple[CombinePlan, list[tuple[Any, ...]], bool]:
        """Returns as `check_dispatch` does; tensors of rows keep their shape, [L, W * max_tokens, ...] or [R, ...]."""
        x, _, weights, out, recv_wait_ns = tensors
        x, weights = as_taken(x), as_taken(weights, weight_dtype(x))
        plan = self._plan_combine(handle, x, weights, out, recv_wait_ns, sum_at, renormalize)
        xs, factors, outs = (listed(value, self._group) for value in (x, weights, out))
        needs_gradient = need_gradient(xs, factors)
        if outs is not None and (needs_gradient or need_gradient(outs)):
            raise ValueError("out must not be given where a gradient is needed")
        return plan, self._of_ranks((x, None, weights, out, recv_wait_ns)), needs_gradient

    def _plan_combine(
        self,
        handle: LowLatencyHandle,
        x: Tensors,
        weights: Tensors | None,
        out: Tensors | None,
        recv_wait_ns: Tensors | None,
        sum_at: str,
        renormalize: bool,
    ) -> CombinePlan:
        group = self._group
        if not isinstance(renormalize, bool):
            raise ValueError(f"renormalize is {renormalize!r}, must be True or False")
        if sum_at not in PLACES:
            raise ValueError(f"sum_at is {sum_at!r}, must be one of {', '.join(map(repr, PLACES))}")
        xs = self._flat("x", as_list("x", x, group), handle, 1)
        check_summable("x", xs[0].dtype, group.device.type)
        check_payload("x", xs, [handle.plan.rows] * len(xs))
        self._check_row("x", xs[0])
        name = "row_weights" if sum_at == "expert" else "topk_weights"
        if weights is not None:
            flat, meaning = as_list(name, weights, group), ": one for each choice of a token, as of dispatch"
            shapes: list[tuple[int, ...]] = [(tokens, handle.topk) for tokens in handle.plan.num_tokens]
            if sum_at == "expert":
                meaning = WEIGHTS_OF_ROWS
                flat = self._flat(name, flat, handle, 0, meaning)
                shapes = [(handle.plan.rows,)] * len(xs)
            check_weights(name, flat, shapes, (weight_dtype(xs),), meaning)
        if out is not None:
            self._check_out(as_list("out", out, group), xs, handle)
        self._check_counters(recv_wait_ns=recv_wait_ns)
        return self._calls.plan_combine(handle, xs[0], None, sum_at_expert=sum_at == "expert", renormalize=renormalize)

    def _check_counters(self, **tensors: Tensors | None) -> None:
        world = self._group.topology.world_size
        for name, given in tensors.items():
            for tensor in () if given is None else as_list(name, given, self._group):
                if tensor.dtype != torch.int64 or tuple(tensor.shape) != (world,):
                    raise ValueError(
                        f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, must be torch.int64 of shape "
                        f"({world},)"
                    )

    def _check_row(self, name: str, x: torch.Tensor, float8: Float8 | None = None) -> None:
        if float8 is not None:
            row = row_format(self._limits.topk, x.shape[1], torch.float8_e4m3fn, float8.scale_dtype)
            if row.slot_bytes > self._limits.largest.slot_bytes:
                raise ValueError(
                    f"{name} has rows of {x.shape[1]} x torch.float8_e4m3fn and their scales, must have at most the "
                    f"{self._limits.row_bytes} bytes of LowLatency's hidden and dtype"
                )
        elif x.shape[1] * x.element_size() > self._limits.row_bytes:
            raise ValueError(
                f"{name} has rows of {x.shape[1]} x {x.dtype}, must have at most the {self._limits.row_bytes} bytes of "
                "LowLatency's hidden and dtype"
            )

    def _rows(
        self,
        layout: str,
        topk: int,
        expert_alignment: int,
        max_recv_tokens: int | None,
        expert_capacity: int | None,
    ) -> int:
        world, local_experts = self._group.topology.world_size, self._group.num_local_experts
        require_int("expert_alignment", expert_alignment, 1, MAX_PADDED_ROWS // local_experts)
        if layout == "masked":
            if expert_alignment != 1 or max_recv_tokens is not None:
                raise ValueError(
                    f"expert_alignment is {expert_alignment} and max_recv_tokens {max_recv_tokens}, must be left out "
                    "with layout 'masked'"
                )
            if expert_capacity is None:
                return local_experts * world * self._limits.max_tokens
            require_int("expert_capacity", expert_capacity, 1, MAX_PADDED_ROWS // local_experts)
            return local_experts * expert_capacity
        if expert_capacity is not None:
            raise ValueError(f"expert_capacity is {expert_capacity}, must be left out with layout 'grouped'")
        if max_recv_tokens is not None:
            require_int("max_recv_tokens", max_recv_tokens, 1, MAX_ROWS)
            return max_recv_tokens
        return world * self._limits.max_tokens * min(topk, local_experts) + local_experts * (expert_alignment - 1)

    def check_id_values(self, inputs: Sequence[tuple[Any, ...]]) -> None:
        """Raises ValueError for invalid ids. inputs: tensors of a dispatch of each rank."""
        experts = self._group.config.num_experts
        for rank, (_, idx, *_) in zip(self._group.ranks, inputs, strict=True):
            expert_ids.check(idx, experts, rank if len(inputs) > 1 else None)

    def _flat(
        self, name: str, tensors: list[torch.Tensor], handle: LowLatencyHandle, inner: int, meaning: str = ""
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

    def _check_out(self, outs: list[torch.Tensor], xs: list[torch.Tensor], handle: LowLatencyHandle) -> None:
        for tensor, x, tokens in zip(outs, xs, handle.plan.num_tokens, strict=True):
            check_dtype("out", tensor, (x.dtype,))
            if tuple(tensor.shape) != (tokens, x.shape[1]):
                raise ValueError(f"out has shape {tuple(tensor.shape)}, must be {(tokens, x.shape[1])}")
