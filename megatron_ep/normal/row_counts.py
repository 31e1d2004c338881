"""The number of rows that a rank receives: exchanged with the other ranks, or expected from the last dispatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import RowCounts
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import Topology
from megatron_ep.normal import expert_ids
from megatron_ep.normal.handle import CountRequest

# A dispatch that is launched before its counts are known has room for MORE_ROWS more than the last one needed, and is
# launched again if more than MOST_EMPTY of it would be unused. Other numbers have not been measured.
MORE_ROWS = 1 / 16
MOST_EMPTY = 1 / 8
FEW_ROWS = 64  # rows that do not matter in either case


def max_arrivals(group: RankGroup, max_recv_tokens: int, expert_capacity: int, num_tokens: int) -> int:
    """Returns the number of arriving tokens that tables have room for if the host does not wait for counts.

    Further tokens are dropped. Without a capacity, max_recv_tokens tokens fill all rows. With one, tokens of a full
    expert take no row, so there is room for all tokens, if no rank has more than this one.
    """
    return max_recv_tokens if expert_capacity == 0 else max(max_recv_tokens, group.topology.world_size * num_tokens)


def max_rail_rows(topology: Topology, max_recv_tokens: int, arrivals: int, num_tokens: int) -> int:
    """Returns the number of tokens of other nodes that tables have room for if the host does not wait for counts.

    (N - 1) * T are all of them if no rank has more tokens than this one. Otherwise the bound comes from their
    destinations: each arrives at a rank of this node, which has room for `arrivals`.
    """
    others = topology.nodes - 1
    return min(others * max(num_tokens, max_recv_tokens), others * num_tokens + topology.ranks_per_node * arrivals)


def most(group: RankGroup, request: CountRequest, num_tokens: int) -> RowCounts:
    """Returns the rows that max_recv_tokens gives room for, if the host does not wait for counts."""
    rows = request.max_recv_tokens
    assert rows is not None
    received = max_arrivals(group, rows, request.expert_capacity, num_tokens)
    return RowCounts(num_tokens, rows, received, max_rail_rows(group.topology, rows, received, num_tokens))


def expected(group: RankGroup, request: CountRequest, num_tokens: int, is_flat: bool) -> RowCounts | None:
    """Returns the rows to allocate before the counts are known; None if the host must wait for them first, for example
    because the last dispatch had another number of tokens."""
    last = group.last_counts
    if last is None or not group.live_backend().speculates or last.num_tokens != num_tokens:
        return None
    rows, received, rail = (room_for(count) if count else 0 for count in last[1:])
    if is_flat:  # tables and tensors have the same rows, and unused rows are marked in both
        rows = received
    elif request.expert_capacity:
        rows = request.expert_capacity * group.num_local_experts
    return RowCounts(num_tokens, rows, received, rail)


def room_for(rows: int) -> int:
    """Returns the number of rows to allocate where the last dispatch needed `rows`."""
    return rows + int(MORE_ROWS * rows) + FEW_ROWS


def least_rows(room: RowCounts) -> int:
    """Returns the number of rows below which too much of `room` would be unused."""
    return max(0, int((1 - MOST_EMPTY) * room.rows) - FEW_ROWS)


def known(
    group: RankGroup,
    request: CountRequest,
    topk_idx: Sequence[torch.Tensor],
    totals: Sequence[_C.Totals],
    is_flat: bool,
) -> list[RowCounts]:
    """Returns the counts that an exchange gave, and keeps them for `expected` if the host waited for them. Raises
    ValueError for invalid ids, and what `RankGroup.raise_if_aborted` raises."""
    for number, idx, total in zip(group.ranks, topk_idx, totals, strict=True):
        if total.bad_token >= 0:
            _refuse_ids(group, number, idx, total.bad_token, request.allows_repeats)
    group.raise_if_aborted()
    counts = []
    for idx, total in zip(topk_idx, totals, strict=True):
        rows, received, rail = total.expert_rows, total.received_rows, total.rail_rows
        if request.max_recv_tokens is not None:
            room = most(group, request, len(idx))
            if not request.has_fixed_sizes:  # a flat table has R rows, because the caller gets it
                room = room._replace(received=room.rows if is_flat else min(received, room.received), rail=rail)
            counts.append(room)
            continue
        if not counts:
            group.last_counts = RowCounts(len(idx), rows, received, rail)
        counts.append(RowCounts(len(idx), received if is_flat else rows, received, rail))
    return counts


def _refuse_ids(group: RankGroup, rank: int, topk_idx: torch.Tensor, a_bad_token: int, allows_repeats: bool) -> None:
    backend = group.live_backend()
    # The kernel of a GPU has given up. A reset is safe, because no other process waits, unless a low-latency mode would
    # lose its masks and pending calls.
    is_alone = len(group.ranks) == group.topology.world_size and all(part is group.one_hop for part in backend.parts)
    if group.device.type == "cuda" and is_alone:
        backend.reset()
    first = expert_ids.first_invalid(topk_idx, group.config.num_experts, allows_repeats)
    token = a_bad_token if first is None else first  # ids on a GPU may have been overwritten since
    raise expert_ids.refusal(
        topk_idx, token, group.config.num_experts, rank if len(group.ranks) > 1 else None, allows_repeats
    )
