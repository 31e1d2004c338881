"""Plans of dispatches and combines through rings, with checked arguments.

A plan is everything about a call except addresses, and counts where they vary. It is cached by dtypes, shapes and
settings, because a model repeats its calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from megatron_ep import _C
from megatron_ep.buffer.arguments import PAYLOAD_TYPES
from megatron_ep.buffer.call_cache import Signature, signature
from megatron_ep.buffer.interface import Backend, Members, RowCounts
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import Topology
from megatron_ep.normal import row_counts
from megatron_ep.normal.handle import Handle, RankHandle

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Maybe = Tensor | None
Maybes = Tensors | None
Outputs = tuple[Tensor, Maybe, Maybe]  # rows, scales, weights

# Rows after which an NVLink ring's flag is published, even if no warp waits. Other numbers have not been measured.
NVL_BATCH = 8
# The largest ratio of the memory of combine's intra-rank pass (one sum for each row that may arrive) to the bytes that
# it saves the exchange from reading. With uniform routing and K = 8 the ratio is 1.9 on 8 ranks, 4.3 on 16 and 8.7 on
# 32. With expert_capacity it is far above 5 on many ranks: W * T rows may arrive, and few have several output rows.
MAX_SUM_BYTES = 5
LINE = 32  # alignment of tables, in int32 (128 bytes)

NOTIFY, DISPATCH, WITHOUT_WAIT, SPECULATIVE, RETRY, COMBINE = map(
    int,
    (
        _C.Phase.notify,
        _C.Phase.dispatch,
        _C.Phase.dispatch_without_wait,
        _C.Phase.speculative_dispatch,
        _C.Phase.dispatch_retry,
        _C.Phase.combine,
    ),
)

# Members of the kernels' arguments (csrc/core/args.h) that each launch of a plan passes, in this order.
DISPATCH_PER_LAUNCH = (
    *("topk_idx", "tokens_per_expert", "layout"),  # an exchange of counts needs only these
    *("x", "scales", "weights", "recv_x", "recv_scales", "recv_weights"),
    *("dst_rows", "rail_experts", "source_tokens", "max_rows", "max_received", "max_rail"),
    *("has_intra_rank_pass", "min_rows", "is_speculative", "fills_tables", "resets_since_made"),
)
LAYOUT = DISPATCH_PER_LAUNCH.index("layout")
NOT_COUNTED = (None,) * (len(DISPATCH_PER_LAUNCH) - LAYOUT - 1)  # what an exchange of counts passes after its layout


def _dispatch_values(
    i: int,
    rank: RankHandle,
    inputs: tuple[Tensors, Tensors, Maybes, Maybes],
    outputs: Outputs,
    has_intra_rank_pass: bool,
    min_rows: int,
    is_speculative: bool,
    fills_tables: bool,
    resets_since_made: int,
) -> tuple[Any, ...]:
    """Returns what a dispatch passes for rank i of this process, in the order of DISPATCH_PER_LAUNCH.

    inputs: ids, or none with the layout of a handle, rows, scales and weights of each rank.
    """
    ids, xs, scales, weights = inputs
    layout, dst_rows, rail_experts, source_tokens = rank.addresses or rank.find_addresses()
    recv_x, recv_scales, recv_weights = outputs
    _, max_rows, max_received, max_rail = rank.counts
    return (
        ids[i] if ids else None,
        rank.tokens_per_expert if ids else None,
        layout,
        xs[i],
        scales and scales[i],
        weights and weights[i],
        recv_x,
        recv_scales,
        recv_weights,
        dst_rows,
        rail_experts,
        source_tokens if fills_tables else 0,
        max_rows,
        max_received,
        max_rail,
        has_intra_rank_pass,
        min_rows,
        is_speculative,
        fills_tables,
        resets_since_made,
    )


COMBINE_PER_LAUNCH = (
    *("layout", "x", "weights", "row_weights", "y", "y_weights", "sums", "bias", "second_bias"),
    *("dst_rows", "rail_experts", "max_rows", "max_received", "max_rail", "resets_since_made"),
)
LAYOUT_OF_COMBINE = COMBINE_PER_LAUNCH.index("layout")


def _combine_values(
    i: int,
    rank: RankHandle,
    inputs: tuple[Tensors, Maybes, Maybes, Tensors],
    y: Tensor,
    y_weights: Maybe,
    sums: Maybe,
    resets_since_made: int,
) -> tuple[Any, ...]:
    """Returns what a combine passes for rank i of this process, in the order of COMBINE_PER_LAUNCH.

    inputs: rows, weights that are sent and that multiply rows, of each rank, and the biases of its only one.
    """
    xs, weights, row_weights, biases = inputs
    layout, dst_rows, rail_experts, _ = rank.addresses or rank.find_addresses()
    _, max_rows, max_received, max_rail = rank.counts
    return (
        layout,
        xs[i],
        weights and weights[i],
        row_weights and row_weights[i],
        y,
        y_weights,
        sums,
        biases[0] if biases else None,
        biases[1] if len(biases) > 1 else None,
        dst_rows,
        rail_experts,
        max_rows,
        max_received,
        max_rail,
        resets_since_made,
    )


ONE, GROUPED = 1, "grouped"
# The options of `megatron_ep.dispatch` that a handle has already.
DEFAULTS = {
    "expert_alignment": ONE,
    "expert_capacity": None,
    "max_recv_tokens": None,
    "layout": GROUPED,
    "max_tokens": None,
}


def at(tensors: Maybes, i: int) -> Maybe:
    """Returns the tensor of a rank of this process; None if there are none."""
    return tensors[i] if tensors else None


def format_of(group: RankGroup, topk: int, x: Tensor, scales: Tensor | None, weights: Tensor | None) -> _C.RowFormat:
    """Returns the format in which rows of these tensors are sent. Raises ValueError if a ring cannot hold one row."""
    of_scales = None if scales is None else (scales.dtype, scales.shape[1])
    key = ("row", topk, x.dtype, x.shape[1], of_scales, None if weights is None else weights.dtype)
    known: _C.RowFormat | None = group.call_cache.get(key)
    if known is not None:
        return known
    row = _C.RowFormat(
        payload_bytes=x.shape[1] * x.element_size(),
        scale_bytes=0 if scales is None else scales.shape[1] * scales.element_size(),
        weight_bytes=0 if weights is None else weights.element_size(),
        topk=topk,
        payload_type=PAYLOAD_TYPES[x.dtype],
    )
    min_bytes = row.slot_bytes
    for name, ring_bytes in group.ring_bytes.items():
        if ring_bytes < min_bytes:
            given = getattr(group.config.tuning, name) or ring_bytes  # the heap rounds the configured size up
            raise ValueError(f"Tuning.{name} is {given}, must be at least {min_bytes} for {x.shape[1]} x {x.dtype}")
    group.call_cache.add(key, row)
    return row


def members_of(handle: Handle, row: _C.RowFormat, num_tokens: int) -> Members:
    """Returns the members that dispatches and combines of a rank have in common."""
    group = handle.group
    # A batch is at most half a ring, so that the sender and the receiver can work at the same time.
    batch = 1 << max(0, row.slots(group.heap.nvl_ring_bytes).bit_length() - 2)
    return {
        "num_tokens": num_tokens,
        "nvl_batch": min(NVL_BATCH, batch),
        "rdma_chunk": group.config.tuning.rdma_chunk_tokens,
        "is_flat": handle.is_flat,
        "is_planned": is_planned(handle),
    }


def is_planned(handle: Handle) -> bool:
    """Returns whether the layout was made by a plan of sequences."""
    return bool(handle.ranks) and handle.ranks[0].own_rows is not None


class DispatchPlan:
    """The plan of a dispatch of the ranks of this process through rings, with new ids or with the layout of a handle.

    Lists have one entry per rank of this process. rooms: allocated rows if the host does not wait for counts.
    """

    one_hop = None  # see `Handle`

    def __init__(
        self, handle: Handle, xs: Tensors, scales: Maybes, weights: Maybes, *, clears_end: bool, all_weights: bool
    ):
        group, topk, is_flat, request = handle.group, handle.topk, handle.is_flat, handle.request
        backend = group.live_backend()
        self.topk, self.is_flat, self.device = topk, is_flat, group.device
        self.request: Any = request
        self.row = format_of(group, topk, xs[0], at(scales, 0), at(weights, 0))
        self.hidden, self.dtype, self.num_tokens = xs[0].shape[1], xs[0].dtype, [x.shape[0] for x in xs]
        self.scale_type = None if scales is None else (scales[0].shape[1], scales[0].dtype)
        self.weight_dtype = None if weights is None else weights[0].dtype
        self.pass_rows = math.inf if is_flat else least_for_pass(group, self.row)
        common: Members = {"clears_end": clears_end, "has_all_weights": all_weights}
        if request is not None:
            common |= request.members(handle.topk_idx[0])
            common["clears_padding"] = clears_end or not request.expert_capacity
            self.layout_sizes = [group.heap.layout(tokens, topk)["size"] for tokens in self.num_tokens]
            self.waits = request.max_recv_tokens is None
            self.is_counted = self.waits or backend.host_knows_counts  # counts come before rows are sent
            if not self.waits:
                self.rooms = [row_counts.most(group, request, tokens) for tokens in self.num_tokens]
        members = [members_of(handle, self.row, tokens) | common for tokens in self.num_tokens]
        self.call = backend.launcher.prepare_dispatch(self.row, members, DISPATCH_PER_LAUNCH)

    def run(self, handle: Handle, backend: Backend, xs: Tensors, scales: Maybes, weights: Maybes) -> list[Outputs]:
        """Launches the dispatch: with the ids in the handle, making its layout, or with that layout. Returns rows,
        their scales and weights."""
        group, stream, ids = handle.group, backend.current_stream(), handle.topk_idx
        handle.request, handle.topk_idx = None, ()
        if ids and self.is_counted:
            outputs = self._run_counted(handle, backend, stream, ids, xs, scales, weights)
        else:
            phase = DISPATCH
            if ids:
                phase, handle.ranks = WITHOUT_WAIT, []
                for i, room in enumerate(self.rooms):
                    per_expert = torch.empty(2, group.num_local_experts, dtype=torch.int64, device=self.device)
                    handle.ranks.append(self._new_rank(i, stream, room, None, per_expert))
            outputs, given = self._arguments(handle, backend, stream, handle.ranks, ids, xs, scales, weights)
            backend.launch(backend.launcher, self.call, phase, stream, given)
            group.calls.note("dispatch", given[LAYOUT])
        if backend.aborted() is not None:
            group.raise_if_aborted()
        return outputs

    def _run_counted(
        self, handle: Handle, backend: Backend, stream: int, ids: Tensors, xs: Tensors, scales: Maybes, weights: Maybes
    ) -> list[Outputs]:
        group, request, given = handle.group, self.request, (ids, xs, scales, weights)
        room, phase, layouts, per_expert = None, DISPATCH, [], []
        for i in range(len(xs)):
            per_expert.append(backend.new_counts(group.num_local_experts, wait=self.waits, index=i))
        if self.waits and len(xs) == 1:
            room = row_counts.expected(group, request, self.num_tokens[0], self.is_flat)
        if room is not None:
            least = row_counts.least_rows(room)
            try:
                ranks = [self._new_rank(0, stream, room, None, per_expert[0])]
                outputs, values = self._arguments(handle, backend, stream, ranks, *given, least=least, speculative=True)
            except torch.cuda.OutOfMemoryError:  # tensors of the exact size may still fit
                room = None
        if room is not None:
            totals, fits = backend.launch(backend.launcher, self.call, SPECULATIVE, stream, values)
            counts = row_counts.known(group, request, ids, totals, self.is_flat)
            per_expert = [backend.taken_counts(per_expert[0])]
            if fits:
                group.calls.note("dispatch", values[LAYOUT])
                ranks[0].counts, ranks[0].tokens_per_expert, handle.ranks = counts[0], per_expert[0], ranks
                for tensor in outputs[0]:
                    if tensor is not None:
                        tensor.resize_(counts[0].rows, *tensor.shape[1:])
                return outputs
            layouts, phase = [ranks[0].layout], RETRY
            del ranks, outputs, values  # the guess was wrong, and its memory can hold tensors of the exact size
        else:
            asked: tuple[Any, ...] = ()
            for i, size in enumerate(self.layout_sizes):
                layouts.append(torch.empty(size, dtype=torch.int32, device=self.device))
                asked += (ids[i], per_expert[i], layouts[i], *NOT_COUNTED)
            totals, _ = backend.launch(backend.launcher, self.call, NOTIFY, stream, asked)
            counts = row_counts.known(group, request, ids, totals, self.is_flat)
            if self.waits:
                per_expert = list(map(backend.taken_counts, per_expert))
        n = len(xs)
        ranks = list(map(self._new_rank, range(n), [stream] * n, counts, layouts, per_expert))
        outputs, values = self._arguments(handle, backend, stream, ranks, *given)
        handle.ranks = ranks
        backend.launch(backend.launcher, self.call, phase, stream, values)
        group.calls.note("dispatch", values[LAYOUT])
        return outputs

    def _new_rank(
        self, i: int, made_on: int, counts: RowCounts, layout: Tensor | None, per_expert: Tensor
    ) -> RankHandle:
        """Returns a rank's handle with tables for `counts` rows. layout: None: it precedes the tables in memory."""
        request, topk = self.request, self.topk
        _, _, received, rail = counts
        if request.has_fixed_sizes:
            sizes = ((received, topk), (rail, topk))
            dst_rows, rail_experts = (torch.empty(*n, dtype=torch.int32, device=self.device) for n in sizes)
            if layout is None:
                layout = torch.empty(self.layout_sizes[i], dtype=torch.int32, device=self.device)
            return RankHandle(topk, counts, layout, per_expert, made_on, dst_rows=dst_rows, rail_experts=rail_experts)
        first = 0 if layout is not None else -(-self.layout_sizes[i] // LINE) * LINE
        rail_starts = first + received * topk
        size = source_starts = rail_starts + rail * topk
        if request.keeps_source_tokens:
            size += received
        tables = torch.empty(size, dtype=torch.int32, device=self.device)
        starts = (first, rail_starts, source_starts if request.keeps_source_tokens else None)
        return RankHandle(topk, counts, tables if layout is None else layout, per_expert, made_on, tables, starts)

    def _arguments(
        self,
        handle: Handle,
        backend: Backend,
        stream: int,
        ranks: Sequence[RankHandle],
        ids: Tensors,
        xs: Tensors,
        scales: Maybes,
        weights: Maybes,
        *,
        least: int = 0,
        speculative: bool = False,
    ) -> tuple[list[Outputs], tuple[Any, ...]]:
        """Allocates the outputs and returns them with the arguments of the launch that fills them."""
        parts: list[Outputs] = []
        given: tuple[Any, ...] = ()
        inputs = (ids, xs, scales, weights)
        resets = handle.group.resets - handle.made_after_resets
        for i, rank in enumerate(ranks):
            if rank.made_on != stream:
                backend.keep_for_launch(rank.tensors(), rank.made_on)
            rows = rank.counts.rows
            out = backend.new_output((rows, self.hidden), self.dtype)
            out_scales = out_weights = None
            if self.scale_type is not None:
                out_scales = backend.new_output((rows, self.scale_type[0]), self.scale_type[1])
            if self.weight_dtype is not None:
                shape = (rows, self.topk) if self.is_flat else (rows,)
                out_weights = torch.empty(shape, dtype=self.weight_dtype, device=self.device)
            fills, rank.has_tables = not rank.has_tables, True
            if rank.own_rows is not None:  # the pass copies rows that stay on this rank
                passes = rank.own_rows * self.row.payload_bytes >= backend.min_local_bytes
            else:
                passes = rows >= self.pass_rows and has_pass(handle.group, self.row, rows, backend.min_stores)
            outputs = (out, out_scales, out_weights)
            given += _dispatch_values(i, rank, inputs, outputs, passes, least, speculative, fills, resets)
            parts.append(outputs)
        return parts, given


class CombinePlan:
    """The plan of a combine of the ranks of this process through rings. weights are sent with the rows, row_weights
    multiply them."""

    def __init__(self, handle: Handle, xs: Tensors, weights: Maybes, row_weights: Maybes):
        group = handle.group
        self.device, self.hidden, self.dtype = group.device, xs[0].shape[1], xs[0].dtype
        self.topk, self.num_tokens = handle.topk, [rank.counts.num_tokens for rank in handle.ranks]
        self.weight_dtype = None if weights is None else weights[0].dtype
        self.row = format_of(group, handle.topk, xs[0], None, at(weights, 0))
        sums_apart = not handle.is_flat and not is_planned(handle)
        self.pass_rows = least_for_pass(group, self.row) if sums_apart else math.inf
        common: Members = {"is_weighted": row_weights is not None}
        members = [members_of(handle, self.row, tokens) | common for tokens in self.num_tokens]
        self.call = group.live_backend().launcher.prepare_combine(self.row, members, COMBINE_PER_LAUNCH)

    def run(
        self, handle: Handle, backend: Backend, xs: Tensors, weights: Maybes, row_weights: Maybes, biases: Tensors = ()
    ) -> list[tuple[Tensor, Maybe]]:
        """Launches the combine. Returns sums [T, H], and weights [T, K] if there are any."""
        group, stream = handle.group, backend.current_stream()
        resets = group.resets - handle.made_after_resets
        parts: list[tuple[Tensor, Maybe]] = []
        given: tuple[Any, ...] = ()
        inputs = (xs, weights, row_weights, biases)
        for i, rank in enumerate(handle.ranks):
            if rank.made_on != stream:
                backend.keep_for_launch(rank.tensors(), rank.made_on)
            _, rows, received, _ = rank.counts
            y = backend.new_output((self.num_tokens[i], self.hidden), self.dtype)
            y_weights = sums = None
            if self.weight_dtype is not None:
                y_weights = torch.empty(self.num_tokens[i], self.topk, dtype=self.weight_dtype, device=self.device)
            if rows >= self.pass_rows:
                sums = sums_of(group, self.row, rows, received, xs[i])
            given += _combine_values(i, rank, inputs, y, y_weights, sums, resets)
            parts.append((y, y_weights))
        backend.launch(backend.launcher, self.call, COMBINE, stream, given)
        group.calls.note("combine", given[LAYOUT_OF_COMBINE])
        if backend.aborted() is not None:
            group.raise_if_aborted()
        return parts


def dispatch_signature(
    handle: Any, x: Any, topk_idx: Any, weights: Any, scales: Any, settings: tuple[Any, ...]
) -> Signature | None:
    """Returns the key under which the plan of arguments of `megatron_ep.dispatch` is cached once they were checked:
    see `call_cache.signature`. settings: values of the options in `DEFAULTS`."""
    others = () if scales is None else (scales,)
    if handle is None:
        return signature((*settings, *map(type, settings)), x, topk_idx, weights, *others)
    alignment, capacity, most, layout, promise = settings  # each call does this, and a loop takes four times as long
    if not (topk_idx is capacity is most is promise is None and alignment is ONE and layout is GROUPED):
        return None
    if not isinstance(handle, Handle):
        return None
    fits = (handle.topk, handle.is_flat, handle.one_hop, handle.ranks[0].counts.num_tokens)
    return signature(fits, x, None, weights, *others)


def combine_signature(handle: Handle, x: Any, weights: Any) -> Signature | None:
    """Returns the key of arguments of `megatron_ep.combine`; None also for a wrong shape. The number of rows is no part
    of it, because it may change with each call."""
    num_tokens, rows, _, _ = handle.ranks[0].counts
    try:
        needs_gradient, of_weights, shape = x.requires_grad, None, x.shape
        if weights is not None:
            if not weights.is_contiguous() or weights.is_neg() or weights.shape != (rows,):
                return None
            of_weights = (weights.__class__, weights.dtype, weights.device)
            needs_gradient = needs_gradient or weights.requires_grad
        if len(shape) != 2 or shape[0] != rows or not x.is_contiguous() or x.is_neg():
            return None
        if forward_ad._current_level >= 0:
            return None
        of_x = (x.__class__, x.dtype, shape[1], x.device)
        fits = (handle.topk, handle.is_flat, handle.one_hop, num_tokens)
        return (needs_gradient and torch.is_grad_enabled(), of_x, of_weights, *fits)
    except (AttributeError, RuntimeError):  # as in `signature`
        return None


# ---- the intra-rank pass


def has_pass(group: RankGroup, row: _C.RowFormat, rows: int, min_stores: float = 0.0) -> bool:
    """Returns whether separate launches copy, or sum, rows that several experts of this rank share."""
    if group.config.tuning.local_pass is not None:
        return group.config.tuning.local_pass
    least = group.live_backend().min_local_bytes
    return pays_intra_rank_pass(group.topology, row.topk, rows, row.payload_bytes, least, min_stores)


def least_for_pass(group: RankGroup, row: _C.RowFormat) -> float:
    """Returns the number of rows below which there is no intra-rank pass."""
    local_pass = group.config.tuning.local_pass
    if local_pass is not None:
        return 0 if local_pass else math.inf
    return group.live_backend().min_local_bytes / max(1, row.payload_bytes)


def sums_of(group: RankGroup, row: _C.RowFormat, rows: int, arrivals: int, x: Tensor) -> Tensor | None:
    """Returns the tensor [arrivals, H] for the sums of combine's intra-rank pass; None if there is no such pass."""
    if not has_pass(group, row, rows) or not group.live_backend().may_wait_on_side_stream():
        return None
    if not sum_bytes_of(group.topology.world_size, row.topk, rows, arrivals, row.payload_bytes):
        return None
    return torch.empty(arrivals, x.shape[1], dtype=x.dtype, device=group.device)


def _saved_bytes(world_size: int, topk: int, rows: int, row_bytes: int) -> float:
    """Returns the bytes of rows with several output rows on a rank, which an intra-rank pass copies or sums once."""
    return rows * (1 - arrivals_of(world_size, topk)) * row_bytes


@functools.lru_cache(maxsize=64)
def arrivals_of(world_size: int, topk: int) -> float:
    """Returns arriving rows per expert row with uniform routing: K experts are on W * (1 - (1 - 1 / W)^K) ranks."""
    return world_size * (1 - (1 - 1 / world_size) ** topk) / topk


def sum_bytes_of(world_size: int, topk: int, rows: int, arrivals: int, row_bytes: int) -> int:
    """Returns the bytes of the sums of combine's intra-rank pass; 0 if they are too many, so that there is no pass."""
    size = arrivals * row_bytes
    return size if size <= MAX_SUM_BYTES * _saved_bytes(world_size, topk, rows, row_bytes) else 0


def pays_intra_rank_pass(
    topology: Topology, topk: int, rows: int, row_bytes: int, min_bytes: float, min_stores: float = 0.0
) -> bool:
    """Returns whether an intra-rank pass for `rows` expert rows saves time.

    min_bytes: bytes that it must save.
    min_stores: mean stores of an arriving row, to a ring and to output rows, that are too many for the exchange.
    """
    if rows * row_bytes < min_bytes:
        return False
    # With several nodes the exchange also stores rows that it forwards.
    too_many_stores = topology.nodes > 1 or 1 + 1 / arrivals_of(topology.world_size, topk) >= min_stores
    return _saved_bytes(topology.world_size, topk, rows, row_bytes) >= min_bytes and too_many_stores
