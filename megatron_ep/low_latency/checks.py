"""Checks the arguments of low-latency calls, and plans the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.known_calls import KnownCalls, key_of
from megatron_ep.buffer.rank_group import RankGroup, check_summable
from megatron_ep.config import MAX_ROWS, require_int
from megatron_ep.low_latency.calls import LowLatencyCalls
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.plans import CombineArguments, CombinePlan, Counters, DispatchArguments, DispatchPlan
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
    weight_dtype,
)
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
    """Checks arguments, and caches the keys of valid ones, because a model repeats its calls."""

    def __init__(self, group: RankGroup, limits: Limits, calls: LowLatencyCalls):
        self._group = group
        self._limits = limits
        self._calls = calls
        self._plans = KnownCalls()
        self.on_host = group.device.type == "cpu"

    def _listed(self, value: Any) -> list[torch.Tensor]:
        """Returns checked tensors as a list."""
        return list(value) if self._group.takes_lists else [value]

    def _counters(self, **given: Tensors | None) -> Counters:
        """Returns checked counters as lists."""
        return {name: self._listed(value) for name, value in given.items() if value is not None}

    def check_dispatch(
        self, tensors: tuple[Any, ...], settings: tuple[Any, ...], signature: tuple[Any, ...] | None
    ) -> tuple[DispatchArguments, list[torch.Tensor], list[torch.Tensor] | None]:
        """Returns checked arguments, x, and topk_weights, one tensor per rank of this process. tensors, settings: see
        `_plan_dispatch`."""
        x, topk_idx, topk_weights, scales, recv_rows, recv_wait_ns = tensors
        key = key_of(settings, *tensors)
        plan: DispatchPlan | None
        plan, is_as_taken = self._plans.get(key) or (None, False)
        if not is_as_taken:
            x, topk_idx, scales = as_taken(x), as_taken(topk_idx), as_taken(scales)
            topk_weights = as_taken(topk_weights, torch.float32)
            tensors = (x, topk_idx, topk_weights, scales, recv_rows, recv_wait_ns)
            if plan is None:
                plan = self._plan_dispatch(*tensors, *settings)
                is_as_taken = key == key_of(settings, *tensors)
                self._plans.add(key, (plan, is_as_taken))
                if signature is not None and is_as_taken and self._calls.plans_calls:
                    self._plans.add(signature, plan)
        assert plan is not None
        listed = self._listed
        ids = listed(topk_idx)
        if self.on_host:
            self.check_id_values(ids)
        counters = None
        if recv_rows is not None or recv_wait_ns is not None:
            counters = self._counters(recv_rows=recv_rows, recv_wait_ns=recv_wait_ns)
        given = DispatchArguments(plan, ids, None if scales is None else listed(scales), counters)
        return given, listed(x), None if topk_weights is None else listed(topk_weights)

    def find(self, how: tuple[Any, ...], x: Any, weights: Any, ids: Any = None) -> tuple[tuple[Any, ...] | None, Any]:
        """Returns the key of a call of one rank whose tensors are used as they are and need no gradient, and its plan
        once such a call was checked. The key is None for other calls. how: what else the plan depends on."""
        try:
            if not x.is_contiguous() or x.is_neg() or (x.requires_grad and torch.is_grad_enabled()):
                return None, None
            key: tuple[Any, ...] = (how, x.__class__, x.dtype, x.shape, x.device)
            if ids is not None:
                if not ids.is_contiguous() or ids.is_neg():
                    return None, None
                key += (ids.__class__, ids.dtype, ids.shape, ids.device)
            if weights is not None:
                if not weights.is_contiguous() or weights.is_neg():
                    return None, None
                if weights.requires_grad and torch.is_grad_enabled():
                    return None, None
                key += ("weights", weights.__class__, weights.dtype, weights.shape, weights.device)
            return key, self._plans.known.get(key)
        except (AttributeError, TypeError):  # a list of tensors, or an argument that is invalid
            return None, None

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
        """Returns the plan. Raises ValueError for invalid arguments; values of topk_idx are not checked."""
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

    def check_gradient(self, plan: DispatchPlan, xs: Sequence[torch.Tensor]) -> None:
        """Raises ValueError unless the gradient of a dispatch can be combined, in x's dtype even if rows become
        float8."""
        if plan.float8 is None:
            check_summable("the gradient of x", xs[0].dtype, self._group.device.type)
        elif plan.float8.scale_format and any(x.requires_grad for x in xs):
            self._check_row("the gradient of x", xs[0])

    def check_combine(
        self,
        handle: LowLatencyHandle,
        tensors: tuple[Any, ...],
        settings: tuple[Any, ...],
        signature: tuple[Any, ...] | None,
    ) -> tuple[CombineArguments, list[torch.Tensor], list[torch.Tensor] | None]:
        """Returns checked arguments, x, and weights, one tensor per rank of this process in the caller's shape,
        [L, W * max_tokens, ...] or [R, ...]. tensors, settings: see `_plan_combine`."""
        x, weights, out, recv_wait_ns = tensors
        sum_at, renormalize = settings
        how = (sum_at, renormalize, handle.plan)
        key = key_of(how, *tensors)
        plan: CombinePlan | None
        plan, is_as_taken = self._plans.get(key) or (None, False)
        if not is_as_taken:
            x, weights = as_taken(x), as_taken(weights, weight_dtype(x))
            tensors = (x, weights, out, recv_wait_ns)
            if plan is None:
                plan = self._plan_combine(handle, *tensors, *settings)
                is_as_taken = key == key_of(how, *tensors)
                self._plans.add(key, (plan, is_as_taken))
                if signature is not None and is_as_taken and self._calls.plans_calls:
                    self._plans.add(signature, plan)
        assert plan is not None
        listed = self._listed
        counters = None if recv_wait_ns is None else self._counters(recv_wait_ns=recv_wait_ns)
        given = CombineArguments(plan, None if out is None else listed(out), counters)
        return given, listed(x), None if weights is None else listed(weights)

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
        """Returns the plan. Raises ValueError for invalid arguments."""
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

    def check_id_values(self, ids: list[Any]) -> None:
        experts = self._group.config.num_experts
        for rank, idx in zip(self._group.ranks, ids, strict=True):
            expert_ids.check(idx, experts, rank if len(ids) > 1 else None)

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

    def _check_out(
        self,
        outs: list[torch.Tensor],
        xs: list[torch.Tensor],
        handle: LowLatencyHandle,
    ) -> None:
        for tensor, x, tokens in zip(outs, xs, handle.plan.num_tokens, strict=True):
            check_dtype("out", tensor, (x.dtype,))
            if tuple(tensor.shape) != (tokens, x.shape[1]):
                raise ValueError(f"out has shape {tuple(tensor.shape)}, must be {(tokens, x.shape[1])}")
