"""Dispatches and combines of one rank, for both of DeepEP's interfaces. They are not differentiable."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ep.buffer import arguments
from megatron_ep.buffer.any_buffer import rank_group_of
from megatron_ep.buffer.buffer import Buffer
from megatron_ep.buffer.call_cache import signature
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import MAX_ROWS, MAX_TOPK
from megatron_ep.normal import cached_plans
from megatron_ep.normal.handle import CountRequest, Handle, RankHandle
from megatron_ep.normal.row_limit import RowLimit

MAX_BIASES = 2

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # a tensor, or a float8 tensor and its scales


def tensors_of(x: Rows) -> list[torch.Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


def device_of(x: Rows) -> torch.device:
    if not isinstance(tensors_of(x)[0], torch.Tensor):
        raise ValueError(f"x is a {type(x).__name__}, must be a tensor, or a tuple of one and its scales")
    return tensors_of(x)[0].device


def row_bytes(x: Rows, combined: torch.dtype = torch.bfloat16) -> int:
    """Returns the bytes of a row of x, or of one in dtype `combined` if that is larger."""
    values = tensors_of(x)[0]
    return values.shape[-1] * max(combined.itemsize, values.element_size())


class Received(NamedTuple):
    """What a dispatch receives: x [R, H], scales [R, S], weights [R, K], or [R] for grouped rows."""

    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None

    @property
    def rows(self) -> Rows:
        return self.x if self.scales is None else (self.x, self.scales)


@dataclass(eq=False)
class Routes:
    """The layout of a dispatch. ids: its topk_idx, [T, K]."""

    handle: Handle
    ids: torch.Tensor

    @property
    def group(self) -> RankGroup:
        return self.handle.group

    @property
    def rank(self) -> RankHandle:
        return self.handle.ranks[0]

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """int64 [L], rows of each local expert, rounded up to the alignment of the dispatch."""
        return self.rank.tokens_per_expert[1]

    @functools.cached_property
    def rows_per_rank(self) -> torch.Tensor:
        """int32 [W], tokens received from each rank."""
        channels, world = self.group.heap.channels, self.group.topology.world_size
        return self._counts("received", channels * world).view(channels, world).sum(0, dtype=torch.int32)

    @functools.cached_property
    def rows_per_expert(self) -> torch.Tensor:
        """int32 [L], rows of each local expert, not rounded up."""
        return self._counts("expert_count", self.group.num_local_experts).clone()

    @functools.cached_property
    def expert_starts(self) -> torch.Tensor:
        """int32 [L + 1], first row of each local expert if rows are grouped, and the end of the last one's."""
        return self._counts("expert_start", self.group.num_local_experts + 1).clone()

    def _counts(self, part: str, count: int) -> torch.Tensor:
        """Returns int32 [count], a view of a part of the layout, see `_C.Heap.layout`."""
        first = self.group.heap.layout(self.rank.num_tokens, self.handle.topk)[part]
        return self.rank.layout[first : first + count]

    @functools.cached_property
    def local_ids(self) -> torch.Tensor:
        """int32 [tokens received, K], local experts of each token, or -1."""
        rows = self.rank.dst_rows
        if self.handle.is_flat:
            return rows
        expert = torch.searchsorted(self.expert_starts[1:], rows, right=True, out_int32=True)
        came = torch.arange(len(rows), device=rows.device) < self.rows_per_rank.sum()  # other rows are undefined
        return torch.where(came.unsqueeze(1) & (rows >= 0), expert, -1)

    def of_layout(self, is_flat: bool) -> Routes:
        """Returns the same routes for flat or for grouped rows."""
        if is_flat == self.handle.is_flat:
            return self
        if is_flat:
            rank = self.rank.relaid(len(self.rank.dst_rows))
        else:
            rank = self.rank.relaid(int(self.expert_starts[-1]), torch.empty_like(self.rank.dst_rows))
        handle = Handle(self.group, self.handle.topk, [rank], is_flat=is_flat)
        handle.made_after_resets = self.handle.made_after_resets
        routes = Routes(handle, self.ids)
        routes.__dict__["local_ids"] = self.local_ids
        return routes


def _parts(x: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns x [T, H] and its scales [T, S], with any strides, or None."""
    return x if isinstance(x, tuple) else (x, None)


def _check_rows(group: RankGroup, values: torch.Tensor, scales: torch.Tensor | None, num_tokens: int) -> None:
    arguments.as_list("x", values, group)
    arguments.check_payload("x", [values], [num_tokens])
    if (values.dtype == torch.float8_e4m3fn) != (scales is not None):
        raise ValueError(f"x is {values.dtype}, must be a tensor, or of float8_e4m3fn in a tuple with its scales")
    if scales is not None:
        if scales.device != values.device:
            raise ValueError(f"scales of x are on {scales.device}, must be on {values.device}, where x is")
        arguments.check_dtype("scales of x", scales, (torch.float32, torch.int32))
        if scales.dim() != 2 or len(scales) != len(values):
            raise ValueError(f"scales of x have shape {tuple(scales.shape)}, must be [{len(values)}, S]")


def dispatch_rows(
    buffer: Buffer,
    x: Rows,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    alignment: int = 1,
    num_rows: int | None = None,
    limit: RowLimit | None = None,
    max_tokens: int = 0,
    all_weights: bool = False,
    is_flat: bool = True,
) -> tuple[Received, Routes]:
    """Sends rows to the ranks of their experts. Raises ValueError for invalid arguments.

    ids: [T, K], int32 or int64, in [0, E) or -1; repeated experts are allowed if rows are flat.
    weights: float32 [T, K], or None.
    num_rows: R, if it is fixed; rows after the last one are undefined, and have no experts.
    limit: notes omitted rows; weights are NaN after that.
    max_tokens: largest T; 0: any.
    all_weights: flat rows also get the weights of experts on other ranks, which are 0 otherwise.
    """
    group = rank_group_of(buffer)
    with group.abort_peers_on_error():
        group.check_usable()
        values, scales = _parts(x)
        key = signature(("deep_ep dispatch",), values, ids, weights, scales)
        if not group.call_cache.get(key):
            arguments.as_list("topk_idx", ids, group)
            arguments.check_ids([ids])
            _check_rows(group, values, scales, len(ids))
            _check_weights(group, weights, tuple(ids.shape))
            group.call_cache.add(key, True)
        if 0 < max_tokens < len(ids):
            raise ValueError(
                f"num_max_tokens_per_rank is {max_tokens}, must be at least the {len(ids)} tokens of topk_idx"
            )
        arguments.check_alignment(group, alignment)
        arguments.check_num_tokens(group, [ids], alignment)
        if num_rows is not None and num_rows > MAX_ROWS:
            raise ValueError(
                f"num_max_tokens_per_rank is {max_tokens}, must be fewer: they may become {num_rows} rows of a rank, "
                f"which are at most {MAX_ROWS}"
            )
        request = CountRequest(alignment, 0, num_rows, allows_repeats=is_flat, keeps_source_tokens=True)
        handle = Handle(group, ids.shape[1], [], request, [ids], is_flat=is_flat)
        received = _launch(handle, values, scales, weights, all_weights)
        if limit is not None:
            over = limit.note(group, cached_plans.overflow_of(handle)[0])
            if received.weights is not None:
                received.weights.masked_fill_(over, float("nan"))
    return received, Routes(handle, ids)


def dispatch_again(
    routes: Routes, x: Rows, weights: torch.Tensor | None = None, *, all_weights: bool = False
) -> Received:
    """Dispatches with the layout of an earlier dispatch."""
    group = routes.group
    with group.abort_peers_on_error():
        group.check_usable()
        values, scales = _parts(x)
        key = signature(("deep_ep dispatch again", routes.handle.cache_key), values, None, weights, scales)
        if not group.call_cache.get(key):
            _check_rows(group, values, scales, routes.rank.num_tokens)
            _check_weights(group, weights, (routes.rank.num_tokens, routes.handle.topk))
            group.call_cache.add(key, True)
        return _launch(routes.handle, values, scales, weights, all_weights)


def combine(
    routes: Routes,
    x: torch.Tensor,
    weights: torch.Tensor | None = None,
    bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    *,
    sums_weights: bool = False,
    rounds_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the sums [T, H] of each token's rows, and the weights [T, K], each from the rank of its expert.

    x: [R, H]. weights: float32 [R, K], or [R] for grouped rows. bias: one or two [T, H].
    The sum begins with the bias and adds the partial sums of ranks in the order of the last k of each, in fp32,
    rounded once. A partial sum of a rank is rounded too, unless it travels in fp32 (rounds_once).
    sums_weights: for flat rows, sums the weights over all ranks that received the token, regardless of their experts.
    """
    group = routes.group
    biases = [b for b in (bias if isinstance(bias, tuple) else (bias,)) if b is not None]
    with group.abort_peers_on_error():
        group.check_usable()
        key = signature(("deep_ep combine", routes.handle.cache_key), x, None, weights, *biases)
        if not group.call_cache.get(key):
            _check_combine(routes, x, weights, biases)
            group.call_cache.add(key, True)
        dtype = x.dtype
        if rounds_once and dtype.itemsize < torch.float32.itemsize:
            x, biases = x.float(), [bias.float() for bias in biases]
        sent_weights = None if weights is None or sums_weights else [weights]
        out, out_weights = cached_plans.launch_combine(routes.handle, [x], sent_weights, biases=biases)
        if weights is not None and sums_weights:
            return out[0].to(dtype), cached_plans.launch_combine(routes.handle, [weights], None)[0][0]
        return out[0].to(dtype), None if out_weights is None else out_weights[0]


def _check_combine(
    routes: Routes, x: torch.Tensor, weights: torch.Tensor | None, biases: Sequence[torch.Tensor]
) -> None:
    group, rows, topk = routes.group, routes.rank.rows, routes.handle.topk
    arguments.as_list("x", x, group)
    arguments.check_summable("x", x.dtype, group.device.type)
    arguments.check_payload("x", [x], [rows])
    _check_weights(group, weights, (rows, topk) if routes.handle.is_flat else (rows,))
    if len(biases) > MAX_BIASES or topk + len(biases) > MAX_TOPK:
        raise ValueError(
            f"bias has {len(biases)} tensors, must have at most {MAX_BIASES}, with K <= {MAX_TOPK} - their number"
        )
    for bias in biases:
        arguments.as_list("bias", bias, group)
        arguments.check_weights("bias", [bias], [(routes.rank.num_tokens, x.shape[1])], (x.dtype,))


def _check_weights(group: RankGroup, weights: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if weights is not None:
        arguments.as_list("topk_weights", weights, group)
        arguments.check_weights("topk_weights", [weights], [shape], (torch.float32,))


def _launch(
    handle: Handle, values: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor | None, all_weights: bool
) -> Received:
    out, out_scales, out_weights = cached_plans.launch_dispatch(
        handle,
        [values],
        None if scales is None else [scales.contiguous()],
        None if weights is None else [weights],
        clears_end=False,
        all_weights=all_weights,
    )
    return Received(
        out[0], None if out_scales is None else out_scales[0], None if out_weights is None else out_weights[0]
    )
