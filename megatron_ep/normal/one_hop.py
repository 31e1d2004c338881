"""Dispatches and combines with few tokens, in one hop: plans that fill the arguments of the low-latency kernels.

A row goes straight to each rank that wants it. Results have the bits of the rings, which all other calls take, except
sums over several nodes, which the rings round once more per node. Lists have one entry per rank of this process.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import Backend, RowCounts
from megatron_ep.buffer.low_latency import LowLatencyRanks
from megatron_ep.buffer.rank_group import PAYLOAD_TYPES, RankGroup
from megatron_ep.normal import expert_ids
from megatron_ep.normal.handle import Handle, RankHandle
from megatron_ep.normal.plan import Maybe, Maybes, Outputs, Tensor, Tensors
from megatron_ep.normal.row_counts import least_rows, max_arrivals
from megatron_ep.reference import SCALE_BLOCK

# Members of csrc/core/low_latency_args.h that each launch passes, rank by rank, in this order.
DISPATCH_PER_LAUNCH = (
    *("layout", "call", "topk_idx", "x", "scales", "weights", "recv_x", "recv_scales", "recv_weights"),
    *("recv_experts", "tokens_per_expert", "max_rows", "layout_call", "resets_since_made"),
)
COMBINE_PER_LAUNCH = (
    *("layout", "call", "x", "values", "row_weights", "y", "y_values", "max_rows", "layout_call", "resets_since_made"),
)
OVERFLOW = int(_C.LowLatencyHeap.overflow_offset)  # in a handle's layout


def goes_in_one_hop(group: RankGroup, layout: str, max_tokens: int | None, x: Tensor, is_traced: bool) -> bool:
    """Returns whether a dispatch goes in one hop, and with it all later calls with its handle; otherwise they go
    through rings. All ranks decide alike, because the number of tokens is a promise of all.

    max_tokens: argument of the dispatch. x: rows of this rank, before a conversion to float8.
    """
    launches, promised = group.one_hop, max_tokens or group.config.max_tokens
    if launches is None or promised is None or promised > launches.max_tokens:
        return False
    row_bytes = x.shape[1] * max(2, x.element_size())  # sums are of at least two bytes per element
    keeps_flat_rows = launches.heap.lines
    fits = (layout == "grouped" or keeps_flat_rows) and row_bytes <= launches.largest.payload_bytes
    return fits and not is_traced


class OneHopDispatchPlan:
    """The plan of a dispatch of the ranks of this process, with new ids or with the layout of a handle."""

    def __init__(self, handle: Handle, xs: Tensors, scales: Maybes, weights: Maybes, *, clears_end: bool):
        group, request = handle.group, handle.one_hop
        assert request is not None
        launches = _launches_of(group)
        self.topk, self.one_hop, self.hidden, self.dtype = handle.topk, request, xs[0].shape[1], xs[0].dtype
        self.is_flat = handle.is_flat
        self.is_new, self.offsets = handle.request is not None, launches.offsets(handle.topk)
        self.waits = request.max_recv_tokens is None
        self.num_tokens = [x.shape[0] for x in xs]
        self.scale_type = None if scales is None else (scales[0].shape[1], scales[0].dtype)
        self.weight_dtype = None if weights is None else weights[0].dtype
        is_aligned = request.expert_alignment > 1 and not self.is_flat
        has_padding = is_aligned or request.expert_capacity > 0
        self.clears_rows = is_aligned or (clears_end and (has_padding or not self.waits))
        world, local_experts = group.topology.world_size, group.num_local_experts
        self.room = request.max_recv_tokens or request.expert_capacity * local_experts
        if not self.room:
            grouped = min(self.topk, local_experts), local_experts * (request.expert_alignment - 1)
            copies, padding = (1, 0) if self.is_flat else grouped
            self.room = world * launches.max_tokens * copies + padding
        members = {
            "index_bytes": handle.topk_idx[0].element_size() if self.is_new else torch.int32.itemsize,
            "expert_alignment": request.expert_alignment,
            "expert_rows": request.expert_capacity,
            "clears_weights": (self.is_flat or weights is not None) and (has_padding or not self.waits),
            "is_flat": self.is_flat,
            "host_waits": self.is_new and self.waits,
        }
        scale_dtype = None if scales is None else scales[0].dtype
        row = _format_of(launches, self.topk, xs[0], scale_dtype, self.weight_dtype)
        of_ranks, most = [], world * launches.max_tokens
        for tokens in self.num_tokens:
            received = max_arrivals(request.max_recv_tokens or most, request.expert_capacity, tokens, world)
            limit = received if received < most and not self.is_flat else 0  # flat tokens beyond R have no row
            of_ranks.append(members | {"num_tokens": tokens, "max_received": limit})
        self.call = launches.launcher.prepare_dispatch(row, of_ranks, DISPATCH_PER_LAUNCH)

    def run(self, handle: Handle, backend: Backend, xs: Tensors, scales: Maybes, weights: Maybes) -> list[Outputs]:
        """See `megatron_ep.normal.plan.DispatchPlan`."""
        group, launches, stream = handle.group, _launches_of(handle.group), backend.current_stream()
        ids, handle.request, handle.topk_idx = handle.topk_idx, None, ()
        if self.is_new:
            self._check_ids(group, ids)
        else:
            _check(handle, backend, stream)
        parts: list[Outputs] = []
        made: list[RankHandle] = []
        per_launch: tuple[Any, ...] = ()
        for i, x in enumerate(xs):
            # Another dispatch with a handle's layout makes the same layout again, in other memory.
            layout = torch.empty(self.offsets["size"], dtype=torch.int32, device=group.device)
            counts, experts, rows, layout_call = None, None, self.room, 0
            chosen: Any
            if self.is_new:
                counts, chosen = backend.new_counts(group.num_local_experts, wait=self.waits, index=i), ids[i]
                if self.is_flat:
                    experts = torch.empty(rows, self.topk, dtype=torch.int32, device=group.device)
                of_rank = RowCounts(self.num_tokens[i], rows, 0, 0)
                made.append(RankHandle(self.topk, of_rank, layout, counts, stream, dst_rows=experts))
            else:
                rows, before = handle.ranks[i].rows, handle.ranks[i].layout.data_ptr()
                chosen, layout_call = (before + 4 * self.offsets[part] for part in ("experts", "dispatch_call"))
            out, out_scales, probs = parts_of_rank = self._new_outputs(backend, rows)
            parts.append(parts_of_rank)
            call = layout.data_ptr() + 4 * self.offsets["dispatch_call"]
            per_launch += (layout, call, chosen, x, scales and scales[i], weights and weights[i])
            per_launch += (out, out_scales, probs)
            per_launch += (experts, counts, rows, layout_call, handle.resets_since_made)
        counted = launches.launch(backend, self.call, stream, per_launch)
        group.calls.note("dispatch", id((made or handle.ranks)[0].layout))
        if (aborted := backend.aborted()) is not None:
            if made and self.waits and aborted[0] == "bad_input" and aborted[1] in group.ranks:  # found by a GPU
                expert_ids.check(ids[group.ranks.index(aborted[1])], group.config.num_experts)
            group.raise_if_aborted()
        if made and self.waits:
            parts = [self._taken(backend, *each) for each in zip(made, parts, counted[0], strict=True)]
        handle.ranks = made or handle.ranks
        return parts

    def _check_ids(self, group: RankGroup, ids: Tensors) -> None:
        """Raises ValueError for invalid ids on the CPU. On a GPU the kernels find them."""
        if group.device.type == "cpu":
            for rank, idx in zip(group.ranks, ids, strict=True):
                expert_ids.check(idx, group.config.num_experts, rank if len(ids) > 1 else None)

    def _taken(self, backend: Backend, rank: RankHandle, outputs: Outputs, totals: _C.Totals) -> Outputs:
        """Returns the outputs with the rows for which the host has waited. Copies them if much room is unused."""
        rank.tokens_per_expert = backend.taken_counts(rank.tokens_per_expert)
        rows, room = totals.expert_rows, rank.counts
        rank.take_rows(rows)
        if rows < least_rows(room):
            out, scales, probs = outputs
            scales, probs = (tensor if tensor is None else tensor[:rows].clone() for tensor in (scales, probs))
            return out[:rows].clone(), scales, probs
        for tensor in outputs:
            if tensor is not None:
                tensor.resize_(rows, *tensor.shape[1:])
        return outputs

    def _new_outputs(self, backend: Backend, rows: int) -> Outputs:
        out = backend.new_output((rows, self.hidden), self.dtype)
        scales = probs = None
        if self.scale_type is not None:
            scales = backend.new_output((rows, self.scale_type[0]), self.scale_type[1])
        if self.weight_dtype is not None:
            shape = (rows, self.topk) if self.is_flat else (rows,)
            probs = backend.new_output(shape, self.weight_dtype)
        if self.clears_rows:
            fill_with_zeros(out, scales)
        return out, scales, probs


class OneHopCombinePlan:
    """The plan of a combine of the ranks of this process. weights are sent with the rows, row_weights multiply them."""

    def __init__(self, handle: Handle, xs: Tensors, weights: Maybes):
        launches = _launches_of(handle.group)
        self.offsets, self.topk = launches.offsets(handle.topk), handle.topk
        self.weight_dtype = None if weights is None else weights[0].dtype
        row = _format_of(launches, self.topk, xs[0], None, self.weight_dtype)
        common = {"sum_at_expert": True, "is_flat": handle.is_flat}
        members = [common | {"num_tokens": rank.num_tokens} for rank in handle.ranks]
        self.call = launches.launcher.prepare_combine(row, members, COMBINE_PER_LAUNCH)

    def run(
        self, handle: Handle, backend: Backend, xs: Tensors, weights: Maybes, row_weights: Maybes, biases: Tensors = ()
    ) -> list[tuple[Tensor, Maybe]]:
        """See `megatron_ep.normal.plan.CombinePlan`."""
        assert not biases
        group, stream = handle.group, backend.current_stream()
        _check(handle, backend, stream)
        parts: list[tuple[Tensor, Maybe]] = []
        per_launch: tuple[Any, ...] = ()
        for i, rank in enumerate(handle.ranks):
            y = backend.new_output((rank.num_tokens, xs[i].shape[1]), xs[i].dtype)
            y_weights = None
            if self.weight_dtype is not None:
                y_weights = torch.empty(rank.num_tokens, self.topk, dtype=self.weight_dtype, device=group.device)
            parts.append((y, y_weights))
            call, layout_call = (
                rank.layout.data_ptr() + 4 * self.offsets[part] for part in ("combine_call", "dispatch_call")
            )
            factors: Maybe = None if row_weights is None else row_weights[i]
            if factors is not None and not factors.numel():
                factors = rank.layout  # an empty tensor has the address 0, but the call is weighted all the same
            per_launch += (rank.layout, call, xs[i], weights and weights[i], factors, y, y_weights)
            per_launch += (rank.rows, layout_call, handle.resets_since_made)
        _launches_of(group).launch(backend, self.call, stream, per_launch)
        group.calls.note("combine", id(handle.ranks[0].layout))
        if backend.aborted() is not None:
            group.raise_if_aborted()
        return parts


def _launches_of(group: RankGroup) -> LowLatencyRanks:
    group.live_backend()  # raises if the buffer is closed
    assert group.one_hop is not None, "a handle in one hop has a group with these launches"
    return group.one_hop


def _check(handle: Handle, backend: Backend, stream: int) -> None:
    """Keeps the handle's memory for the next launch. Raises ValueError if its dispatch was given up, after a reset."""
    for rank in handle.ranks:
        if rank.made_on != stream:
            backend.keep_for_launch([rank.layout], rank.made_on)
        if handle.resets_since_made and int(rank.layout[OVERFLOW]) == -1:
            raise ValueError("handle is of a dispatch that failed before the buffer's reset, must be of a later one")


def _format_of(
    launches: LowLatencyRanks, topk: int, x: Tensor, scale_dtype: torch.dtype | None, weights: torch.dtype | None
) -> _C.RowFormat:
    payload_bytes = x.shape[1] * x.element_size()
    most = launches.largest.payload_bytes
    if payload_bytes > most:
        raise ValueError(
            f"x has rows of {x.shape[1]} x {x.dtype}, must have at most {most} bytes with the handle of a dispatch in "
            "one hop, see Config.row_bytes"
        )
    return row_format(topk, x.shape[1], x.dtype, scale_dtype, 0 if weights is None else weights.itemsize)


def row_format(
    topk: int, hidden: int, dtype: torch.dtype, scale_dtype: torch.dtype | None, weight_bytes: int = 8
) -> _C.RowFormat:
    """Returns the format of rows of the low-latency kernels."""
    return _C.RowFormat(
        payload_bytes=hidden * dtype.itemsize,
        scale_bytes=-(-hidden // SCALE_BLOCK) * scale_dtype.itemsize if scale_dtype else 0,
        weight_bytes=weight_bytes,
        topk=topk,
        payload_type=PAYLOAD_TYPES[dtype],
    )


def fill_with_zeros(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.view(torch.uint8).zero_()  # as bytes, because torch cannot fill every dtype
