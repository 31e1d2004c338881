"""Dispatches and combines with few tokens, in one hop: plans that fill the arguments of the low-latency kernels.

A row goes straight to each rank that wants it. Results have the bits of the rings, which all other calls take, except
sums over several nodes, which the rings round once more per node. Lists have one entry per rank of this process.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.arguments import PAYLOAD_TYPES
from megatron_ep.buffer.interface import Backend, RowCounts
from megatron_ep.buffer.low_latency import RECEIVE, LowLatencyRanks
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.normal import expert_ids
from megatron_ep.normal.handle import Handle, RankHandle
from megatron_ep.normal.plan import Maybe, Maybes, Outputs, Tensor, Tensors
from megatron_ep.normal.row_counts import least_rows, max_arrivals, room_for
from megatron_ep.reference import SCALE_BLOCK

OVERFLOW = int(_C.LowLatencyHeap.overflow_offset)  # in a handle's layout


def goes_in_one_hop(group: RankGroup, layout: str, max_tokens: int | None, x: Tensor) -> bool:
    """Returns whether a dispatch goes in one hop, and with it all later calls with its handle; otherwise they go
    through rings. All ranks decide alike, because the number of tokens is a promise of all.

    max_tokens: argument of the dispatch. x: rows of this rank, before a conversion to float8.
    """
    launches, promised = group.one_hop, max_tokens or group.config.max_tokens
    if launches is None or promised is None or promised > launches.max_tokens:
        return False
    row_bytes = x.shape[1] * max(2, x.element_size())  # sums are of at least two bytes per element
    keeps_flat_rows = launches.heap.lines
    return (layout == "grouped" or keeps_flat_rows) and row_bytes <= launches.largest.payload_bytes


class OneHopDispatchPlan:
    """The plan of a dispatch of the ranks of this process, with new ids or with the layout of a handle."""

    def __init__(self, handle: Handle, xs: Tensors, scales: Maybes, weights: Maybes, *, clears_end: bool):
        group, request = handle.group, handle.one_hop
        assert request is not None
        launches = _launches_of(group)
        self.topk, self.one_hop, self.hidden, self.dtype = handle.topk, request, xs[0].shape[1], xs[0].dtype
        self.is_flat, self.device, self.local_experts = handle.is_flat, group.device, group.num_local_experts
        self.is_new, offsets = handle.request is not None, launches.offsets(handle.topk)
        self.layout_size = offsets["size"]
        self.call_offset, self.experts_offset = (4 * offsets[part] for part in ("dispatch_call", "experts"))
        self.waits = self.is_new and request.max_recv_tokens is None
        self.checks_ids = self.is_new and self.device.type == "cpu"  # on a GPU the kernels do
        self.num_tokens = [x.shape[0] for x in xs]
        self.scale_type = None if scales is None else (scales[0].shape[1], scales[0].dtype)
        self.weight_dtype = None if weights is None else weights[0].dtype
        is_aligned = request.expert_alignment > 1 and not self.is_flat
        has_fixed_rows = request.max_recv_tokens is not None
        has_padding = is_aligned or request.expert_capacity > 0
        self.clears_rows = is_aligned or (clears_end and (has_padding or has_fixed_rows))
        world = group.topology.world_size
        self.rows = request.max_recv_tokens or request.expert_capacity * self.local_experts  # 0: the host waits for it
        copies, padding = min(self.topk, world if self.is_flat else group.config.num_experts), 0
        if is_aligned:
            padding = self.local_experts * (request.expert_alignment - 1)
        self.usual_rows = [tokens * copies + padding for tokens in self.num_tokens]  # if all ranks get as many
        members = {
            "index_bytes": handle.topk_idx[0].element_size() if self.is_new else torch.int32.itemsize,
            "expert_alignment": request.expert_alignment,
            "expert_rows": request.expert_capacity,
            "clears_weights": (self.is_flat or weights is not None) and (has_padding or has_fixed_rows),
            "is_flat": self.is_flat,
            "host_waits": self.waits,
        }
        scale_dtype = None if scales is None else scales[0].dtype
        row = _format_of(launches, self.topk, xs[0], scale_dtype, self.weight_dtype)
        of_ranks, most = [], world * launches.max_tokens
        for tokens in self.num_tokens:
            received = max_arrivals(group, request.max_recv_tokens or most, request.expert_capacity, tokens)
            limit = received if received < most and not self.is_flat else 0  # flat tokens beyond R have no row
            of_ranks.append(members | {"num_tokens": tokens, "max_received": limit})
        self.call = launches.launcher.prepare_dispatch(row, of_ranks, self.PER_LAUNCH)

    def run(self, handle: Handle, backend: Backend, xs: Tensors, scales: Maybes, weights: Maybes) -> list[Outputs]:
        """See `megatron_ep.normal.plan.DispatchPlan`."""
        group, ids, stream = handle.group, handle.topk_idx, backend.current_stream()
        handle.request, handle.topk_idx = None, ()
        if self.checks_ids:
            for number, idx in zip(group.ranks, ids, strict=True):
                expert_ids.check(idx, group.config.num_experts, number if len(ids) > 1 else None)
        given, resets = (ids, xs, scales, weights), group.resets - handle.made_after_resets
        ranks = handle.ranks
        if self.is_new:
            ranks = []
            for i in range(len(xs)):
                layout = torch.empty(self.layout_size, dtype=torch.int32, device=self.device)
                counts = backend.new_counts(self.local_experts, wait=self.waits, index=i)
                room = RowCounts(self.num_tokens[i], self.rows or self._expected(group, i), 0, 0)
                ranks.append(RankHandle(self.topk, room, layout, counts, stream))
        parts, values = self._arguments(backend, ranks, stream, resets, *given)
        launches: Any = group.one_hop
        counted = launches.launch(backend, self.call, stream, values)
        group.calls.note("dispatch", id(ranks[0].layout))
        if backend.aborted() is not None:
            self._raise(group, backend, ids)
        if self.waits:
            if not self.rows:
                totals = counted[0]
                if any(map(_lacks_room, ranks, totals)):
                    # What other ranks have sent stays in the heap until this rank's next dispatch, and is received
                    # once more. The guess was wrong, and its memory can hold tensors of the exact size.
                    del parts, values
                    for rank, total in zip(ranks, totals, strict=True):
                        rank.take_rows(total.expert_rows)
                    parts, values = self._arguments(backend, ranks, stream, resets, *given)
                    backend.launch(launches.launcher, self.call, RECEIVE, stream, values, launches)
                    if backend.aborted() is not None:
                        self._raise(group, backend, ids)
                for i, rank in enumerate(ranks):
                    parts[i] = _taken(rank, parts[i], totals[i].expert_rows)
                group.last_counts = RowCounts(self.num_tokens[0], *2 * (totals[0].expert_rows,), 0)
            for rank in ranks:
                rank.tokens_per_expert = backend.taken_counts(rank.tokens_per_expert)
        handle.ranks = ranks
        return parts

    def _expected(self, group: RankGroup, i: int) -> int:
        """Returns the rows to allocate for a rank before their number is known: see `row_counts.expected`."""
        last = group.last_counts
        if last is None or last.num_tokens != self.num_tokens[i] or len(self.num_tokens) > 1:
            return room_for(self.usual_rows[i])
        return room_for(last.received if self.is_flat else last.rows)

    def _raise(self, group: RankGroup, backend: Backend, ids: Tensors) -> None:
        """Raises the failure that has aborted the backend, unless it came after the end of this call."""
        aborted = backend.aborted()
        if self.waits and aborted is not None and aborted[0] == "bad_input" and aborted[1] in group.ranks:
            expert_ids.check(ids[group.ranks.index(aborted[1])], group.config.num_experts)  # a GPU has found them
        group.raise_if_aborted()

    # Members of csrc/core/low_latency_args.h that each launch passes, rank by rank, in the order of `_arguments`.
    PER_LAUNCH = (
        *("layout", "call", "topk_idx", "x", "scales", "weights", "recv_x", "recv_scales", "recv_weights"),
        *("recv_experts", "tokens_per_expert", "max_rows", "layout_call", "resets_since_made"),
    )

    def _arguments(
        self,
        backend: Backend,
        ranks: list[RankHandle],
        stream: int,
        resets: int,
        ids: Tensors,
        xs: Tensors,
        scales: Maybes,
        weights: Maybes,
    ) -> tuple[list[Outputs], tuple[Any, ...]]:
        """Allocates the outputs and returns them with the arguments of the launch that fills them."""
        parts: list[Outputs] = []
        given: tuple[Any, ...] = ()
        for i, rank in enumerate(ranks):
            rows, layout, counts, experts, layout_call = rank.counts.rows, rank.layout, None, None, 0
            chosen: Any
            if self.is_new:
                chosen, counts = ids[i], rank.tokens_per_expert
                if self.is_flat:
                    experts = rank.dst_rows = torch.empty(rows, self.topk, dtype=torch.int32, device=self.device)
            else:
                # Another dispatch with a handle's layout makes the same layout again, in other memory.
                if rank.made_on != stream:
                    backend.keep_for_launch([layout], rank.made_on)
                before = layout.data_ptr()
                chosen, layout_call = before + self.experts_offset, before + self.call_offset
                layout = torch.empty(self.layout_size, dtype=torch.int32, device=self.device)
            out = backend.new_output((rows, self.hidden), self.dtype)
            out_scales = probs = None
            if self.scale_type is not None:
                out_scales = backend.new_output((rows, self.scale_type[0]), self.scale_type[1])
            if self.weight_dtype is not None:
                shape = (rows, self.topk) if self.is_flat else (rows,)
                probs = torch.empty(shape, dtype=self.weight_dtype, device=self.device)
            if self.clears_rows:
                fill_with_zeros(out, out_scales)
            given += (
                *(layout, layout.data_ptr() + self.call_offset, chosen, xs[i], scales and scales[i]),
                *(weights and weights[i], out, out_scales, probs),
                *(experts, counts, rows, layout_call, resets),
            )
            parts.append((out, out_scales, probs))
        return parts, given


class OneHopCombinePlan:
    """The plan of a combine of the ranks of this process. weights are sent with the rows, row_weights multiply them."""

    def __init__(self, handle: Handle, xs: Tensors, weights: Maybes):
        launches = _launches_of(handle.group)
        offsets, self.device = launches.offsets(handle.topk), handle.group.device
        self.call_offset, self.layout_call_offset = (4 * offsets[part] for part in ("combine_call", "dispatch_call"))
        self.topk, self.hidden, self.dtype = handle.topk, xs[0].shape[1], xs[0].dtype
        self.num_tokens = [rank.num_tokens for rank in handle.ranks]
        self.weight_dtype = None if weights is None else weights[0].dtype
        row = _format_of(launches, self.topk, xs[0], None, self.weight_dtype)
        common = {"sum_at_expert": True, "is_flat": handle.is_flat}
        members = [common | {"num_tokens": tokens} for tokens in self.num_tokens]
        self.call = launches.launcher.prepare_combine(row, members, self.PER_LAUNCH)

    # Members of csrc/core/low_latency_args.h that each launch passes, rank by rank, in the order of `run`.
    PER_LAUNCH = (
        *("layout", "call", "x", "values", "row_weights", "y", "y_values"),
        *("max_rows", "layout_call", "resets_since_made"),
    )

    def run(
        self, handle: Handle, backend: Backend, xs: Tensors, weights: Maybes, row_weights: Maybes, biases: Tensors = ()
    ) -> list[tuple[Tensor, Maybe]]:
        """See `megatron_ep.normal.plan.CombinePlan`."""
        assert not biases
        group, stream = handle.group, backend.current_stream()
        resets = group.resets - handle.made_after_resets
        parts: list[tuple[Tensor, Maybe]] = []
        given: tuple[Any, ...] = ()
        for i, rank in enumerate(handle.ranks):
            if rank.made_on != stream:
                backend.keep_for_launch([rank.layout], rank.made_on)
            y, y_weights = backend.new_output((self.num_tokens[i], self.hidden), self.dtype), None
            if self.weight_dtype is not None:
                y_weights = torch.empty(self.num_tokens[i], self.topk, dtype=self.weight_dtype, device=self.device)
            layout = rank.layout.data_ptr()
            factors: Any = row_weights and row_weights[i]
            if factors is not None and not factors.numel():
                factors = layout  # an empty tensor has the address 0, but the call is weighted all the same
            given += (layout, layout + self.call_offset, xs[i], weights and weights[i], factors, y, y_weights)
            given += (rank.counts.rows, layout + self.layout_call_offset, resets)
            parts.append((y, y_weights))
        launches: Any = group.one_hop
        launches.launch(backend, self.call, stream, given)
        group.calls.note("combine", id(handle.ranks[0].layout))
        if backend.aborted() is not None:
            group.raise_if_aborted()
        return parts


def _lacks_room(rank: RankHandle, totals: _C.Totals) -> bool:
    return bool(totals.expert_rows > rank.counts.rows)


def _taken(rank: RankHandle, outputs: Outputs, rows: int) -> Outputs:
    """Returns the outputs with the rows for which the host has waited. Copies them if much room is unused."""
    room = rank.counts
    if rows == room.rows:
        return outputs
    rank.take_rows(rows)
    if rows < least_rows(room):
        out, scales, probs = (None if tensor is None else tensor.narrow_copy(0, 0, rows) for tensor in outputs)
        assert out is not None
        return out, scales, probs
    for tensor in outputs:
        if tensor is not None:
            tensor.resize_(rows, *tensor.shape[1:])
    return outputs


def _launches_of(group: RankGroup) -> LowLatencyRanks:
    group.live_backend()  # raises if the buffer is closed
    assert group.one_hop is not None, "a handle in one hop has a group with these launches"
    return group.one_hop


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
