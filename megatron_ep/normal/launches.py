"""The launches of the normal mode: counts, dispatch and combine. `megatron_ep.normal.api` has checked their arguments.

Lists have one entry per rank of this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import Backend, RankHandle, RankTensors
from megatron_ep.buffer.rank_group import PAYLOAD_TYPES, RankGroup
from megatron_ep.config import Topology
from megatron_ep.normal import row_counts
from megatron_ep.normal.handle import CountsToAskFor, Handle

# Rows, scales, weights of a rank each.
DispatchOutputs = tuple[list[torch.Tensor], list[torch.Tensor] | None, list[torch.Tensor] | None]

# Rows after which an NVLink ring's flag is published even if nobody waits for it. Not measured against other numbers.
NVL_BATCH = 8
# The largest ratio of the memory that combine's intra-rank pass takes (a sum for each row that may arrive) to the bytes
# that it saves the exchange from reading. Drawn evenly, K = 8 experts come to 1.9 on 8 ranks, to 4.3 on 16 and to 8.7
# on 32. With expert_capacity W * T rows may arrive, and on many ranks few of them have several output rows: far more
# than 5.
MAX_SUM_BYTES = 5
# Offset in a handle's layout. Copied here, because reading it from the extension would break torch.compile's graph.
OVERFLOW = int(_C.Heap.overflow_offset)


def format_of(
    group: RankGroup,
    topk: int,
    x: torch.Tensor,
    scales: Sequence[torch.Tensor] | None,
    weights: Sequence[torch.Tensor] | None,
) -> _C.RowFormat:
    """How rows of these tensors travel. Raises ValueError when a ring cannot hold even one."""
    of_scales = None if scales is None else (scales[0].dtype, scales[0].shape[1])
    looks = ("row", topk, x.dtype, x.shape[1], of_scales, None if weights is None else weights[0].dtype)
    known: _C.RowFormat | None = group.known_calls.get(looks)
    if known is not None:
        return known
    row = _C.RowFormat(
        payload_bytes=x.shape[1] * x.element_size(),
        scale_bytes=scales[0].shape[1] * scales[0].element_size() if scales is not None else 0,
        weight_bytes=weights[0].element_size() if weights is not None else 0,
        topk=topk,
        payload_type=PAYLOAD_TYPES[x.dtype],
    )
    min_bytes = row.slot_bytes
    for name, ring_bytes in group.ring_bytes.items():
        if ring_bytes < min_bytes:
            given = getattr(group.config.tuning, name) or ring_bytes  # that of the heap is rounded up
            raise ValueError(f"Tuning.{name} is {given}, must be at least {min_bytes} for {x.shape[1]} x {x.dtype}")
    group.known_calls.add(looks, row)
    return row


def launch_dispatch(
    handle: Handle,
    x: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None,
    weights: Sequence[torch.Tensor] | None,
    *,
    clears_end: bool,
    all_weights: bool = False,
) -> DispatchOutputs:
    """x [T, H], scales [T, S], weights [T, K] to [R, H], [R, S], [R], grouped by expert; flat: [R, K] of weights. The
    first dispatch of a handle asks for its counts.

    clears_end: also zero the unused rows after the last expert, as their weights are.
    all_weights: flat: those of other ranks' experts, too, which are zeros otherwise.
    """
    group = handle.group
    backend = group.live_backend()
    row = format_of(group, handle.topk, x[0], scales, weights)
    how = (row, NVL_BATCH, group.config.tuning.rdma_chunk_tokens)
    prepare = functools.partial(_prepare_dispatch, handle, x, scales, weights, row, all_weights=all_weights)
    request, counts, again = handle.to_ask_for, None, False
    if request is not None:
        asked = row_counts.prepare(group, request)
        ahead = _prepare_ahead(handle, request, asked, prepare)
        if ahead is None:
            known, is_left = row_counts.exchange(group, request, asked, handle.is_flat)
            counts = asked.settings if is_left else None
        else:
            totals, is_done = backend.dispatch_ahead(ahead[0], *how, asked.settings)
            row_counts.check(group, request, totals)
            known = row_counts.told(group, asked, totals, handle.is_flat)
            if is_done:
                handle.to_ask_for = None
                row_counts.cut(handle.ranks[0], known[0])
                for (tensor,) in filter(None, ahead[1]):
                    tensor.resize_(known[0].rows, *tensor.shape[1:])
                group.calls.note("dispatch", ahead[0][0]["layout"])
                return ahead[1]
            again = True
        del ahead  # a wrong guess: its memory is free for tensors of the right size
        handle.ranks, handle.to_ask_for = row_counts.ranks_of(group, request, asked, known), None
    tensors, out = prepare(clears_end=clears_end)
    backend.enqueue_dispatch(tensors, *how, counts, again)
    group.calls.note("dispatch", tensors[0]["layout"])
    group.raise_if_aborted()
    return out


def _prepare_ahead(
    handle: Handle,
    request: CountsToAskFor,
    asked: row_counts.Asked,
    prepare: Callable[..., tuple[list[RankTensors], DispatchOutputs]],
) -> tuple[list[RankTensors], DispatchOutputs] | None:
    """As `_prepare_dispatch`, for a launch ahead of the counts. None: there is to be none, or no memory for it."""
    room = row_counts.expected(handle.group, request, handle.is_flat)
    if room is None:
        return None
    try:
        handle.ranks = row_counts.ranks_of(handle.group, request, asked, [room])
        tensors, out = prepare(clears_end=False)  # what lies behind the last row is cut off
    except torch.cuda.OutOfMemoryError:  # for those of the right size there may be enough
        return None
    tensors[0] |= {"is_ahead": True, "min_rows": row_counts.least_rows(room)}
    return tensors, out


def _prepare_dispatch(
    handle: Handle,
    x: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None,
    weights: Sequence[torch.Tensor] | None,
    row: _C.RowFormat,
    *,
    clears_end: bool,
    all_weights: bool,
) -> tuple[list[RankTensors], DispatchOutputs]:
    """For a launch, and what it fills."""
    group, topk = handle.group, handle.topk
    backend = group.live_backend()
    out, out_scales, out_weights = [], [], []
    tensors = _tensors_of(backend, handle)
    for i, rank in enumerate(handle.ranks):
        t = tensors[i]
        out.append(backend.new_output((rank.rows, x[i].shape[1]), x[i].dtype))
        t["x"], t["out"], t["clears_end"] = x[i].data_ptr(), out[i].data_ptr(), clears_end
        if scales is not None:
            t["scales"] = scales[i].data_ptr()
            out_scales.append(backend.new_output((rank.rows, scales[i].shape[1]), scales[i].dtype))
            t["out_scales"] = out_scales[i].data_ptr()
        if weights is not None:
            t["weights"] = weights[i].data_ptr()
            size = (rank.rows, topk) if handle.is_flat else (rank.rows,)
            out_weights.append(torch.empty(size, dtype=weights[i].dtype, device=group.device))
            t["out_weights"] = out_weights[i].data_ptr()
        if not rank.has_tables:
            t["fills_tables"] = rank.has_tables = True
            if rank.source_tokens is not None:
                t["source_tokens"] = rank.source_tokens.data_ptr()
        if handle.is_flat:  # each row is stored once
            t["has_all_weights"] = all_weights
        elif _has_intra_rank_pass(group, rank, row, backend.min_stores):
            t["has_intra_rank_pass"] = True
    return tensors, (out, out_scales if scales is not None else None, out_weights if weights is not None else None)


def launch_combine(
    handle: Handle,
    x: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
    row_weights: Sequence[torch.Tensor] | None = None,
    biases: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """x [R, H], weights [R] (flat: [R, K]) to sums [T, H] and single values [T, K]; row_weights [R] multiply x.

    biases: at most two [T, H], of a process with one rank, to which the rows are added; K and their number at most 32.
    """
    group, topk = handle.group, handle.topk
    backend = group.live_backend()
    row = format_of(group, topk, x[0], None, weights)
    out, out_weights, sums = [], [], []
    tensors = _tensors_of(backend, handle)
    for i, rank in enumerate(handle.ranks):
        t = tensors[i]
        out.append(backend.new_output((rank.num_tokens, x[i].shape[1]), x[i].dtype))
        t["x"], t["out"] = x[i].data_ptr(), out[i].data_ptr()
        if weights is not None:
            size = (rank.num_tokens, topk)
            out_weights.append(torch.empty(size, dtype=weights[i].dtype, device=group.device))
            t["weights"], t["out_weights"] = weights[i].data_ptr(), out_weights[i].data_ptr()
        if row_weights is not None:
            t["row_weights"], t["is_weighted"] = row_weights[i].data_ptr(), True
        if biases:
            t["bias"], t["second_bias"] = (*(bias.data_ptr() for bias in biases), 0)[:2]
        may_sum = not handle.is_flat and rank.own_rows is None
        if may_sum and _has_intra_rank_pass(group, rank, row) and backend.may_wait_on_side_stream():
            known = rank.dst_rows.shape[0]
            if sum_bytes_of(group.topology.world_size, topk, rank.rows, known, row.payload_bytes):
                sums.append(torch.empty(known, x[i].shape[1], dtype=x[i].dtype, device=group.device))
                t["sums"] = sums[-1].data_ptr()
    backend.enqueue_combine(tensors, row, NVL_BATCH, group.config.tuning.rdma_chunk_tokens, PAYLOAD_TYPES[x[0].dtype])
    group.calls.note("combine", tensors[0]["layout"])
    group.raise_if_aborted()
    return out, out_weights if weights is not None else None


def tokens_per_expert_of(handle: Handle) -> list[torch.Tensor]:
    """int64 [L], the caller's own. For the first of them nothing is copied: on a GPU that would be one more launch."""
    given = []
    for rank in handle.ranks:
        given.append(rank.counts[1].clone() if rank.has_given_counts else rank.counts[0])
        rank.has_given_counts = True
    return given


def gradient_of_rows(x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of x [R, H], which was multiplied by weights [R] before a combine. grad: [R, H], of the
    products.

    is_row: bool [R], where a token's row lies; in padding x and weights may hold anything.
    """
    return (grad * torch.where(is_row, weights, weights.new_zeros(())).unsqueeze(1)).to(x.dtype)


def gradient_of_weights(
    x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, is_row: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of these weights."""
    products = grad.to(weights.dtype) * x
    return torch.where(is_row, products.sum(dim=1), weights.new_zeros(()))


def overflow_of(handle: Handle) -> list[torch.Tensor]:
    """int32 [1], views: not 0 once rows did not fit."""
    return [rank.layout.narrow(0, OVERFLOW, 1) for rank in handle.ranks]


def check_capture(group: RankGroup, max_recv_tokens: int | None) -> None:
    """Raises ValueError where the host would wait for counts of what a CUDA graph only captures. All ranks capture
    alike: nobody is to be told."""
    backend = group.live_backend()
    if max_recv_tokens is None and not backend.host_knows_counts and backend.is_capturing():
        raise ValueError(
            "max_recv_tokens is None, must be given while a CUDA graph is captured: without it the host waits for "
            "counts that nothing exchanges yet"
        )


def _tensors_of(backend: Backend, handle: Handle) -> list[RankTensors]:
    """For a launch, which adds what else it has."""
    tensors = []
    stream, age = backend.current_stream(), handle.age
    for rank in handle.ranks:
        if rank.made_on != stream:
            tables = (rank.layout, rank.dst_rows, rank.rail_experts, rank.source_tokens)
            backend.keep_for_launch([table for table in tables if table is not None], rank.made_on)
        t = rank.addresses
        if t is None:  # a handle that was put together, or that a plan made
            t = rank.addresses = {
                "layout": rank.layout.data_ptr(),
                "num_tokens": rank.num_tokens,
                **row_counts.tables_of(rank),
            }
            t["is_planned"] = rank.own_rows is not None
        tensors.append({**t, "handle_age": age, "is_flat": handle.is_flat})
    return tensors


def _saved_bytes(world_size: int, topk: int, rows: int, row_bytes: int) -> float:
    """Returns the bytes of rows with several output rows on a rank, which an intra-rank pass copies or sums once.

    With experts drawn evenly, K of them lie on W * (1 - (1 - 1 / W)^K) ranks.
    """
    return rows * (1 - arrivals_of(world_size, topk)) * row_bytes


@functools.lru_cache(maxsize=64)
def arrivals_of(world_size: int, topk: int) -> float:
    """Rows that arrive for each row of an expert."""
    return world_size * (1 - (1 - 1 / world_size) ** topk) / topk


def sum_bytes_of(world_size: int, topk: int, rows: int, arrivals: int, row_bytes: int) -> int:
    """What combine takes for the sums of its intra-rank pass, for so many rows of experts, of as many tokens at most; 0
    where that is too much: then there is no such pass."""
    size = arrivals * row_bytes
    return size if size <= MAX_SUM_BYTES * _saved_bytes(world_size, topk, rows, row_bytes) else 0


def _has_intra_rank_pass(group: RankGroup, rank: RankHandle, row: _C.RowFormat, min_stores: float = 0.0) -> bool:
    """Whether arrived rows with several output rows are copied, or summed, by launches of their own; of a
    plan's, whether those are copied so that stay on their rank.
    """
    least = group.live_backend().min_local_bytes
    if rank.own_rows is not None:
        return rank.own_rows * row.payload_bytes >= least
    if group.config.tuning.local_pass is not None:
        return group.config.tuning.local_pass
    return pays_intra_rank_pass(group.topology, row.topk, rank.rows, row.payload_bytes, least, min_stores)


def pays_intra_rank_pass(
    topology: Topology, topk: int, rows: int, row_bytes: int, min_bytes: float, min_stores: float = 0.0
) -> bool:
    """Whether it saves time to copy, or to sum, by launches of their own those of so many rows that arrive together.

    A row that arrives is stored in a ring and in each of its output rows.

    min_bytes: that must be saved.
    min_stores: of a row, which would be too many for the exchange.
    """
    if rows * row_bytes < min_bytes:
        return False
    # between nodes the exchange has other rows to store, too
    too_many_stores = topology.nodes > 1 or 1 + 1 / arrivals_of(topology.world_size, topk) >= min_stores
    return _saved_bytes(topology.world_size, topk, rows, row_bytes) >= min_bytes and too_many_stores
