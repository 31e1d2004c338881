"""How many rows a rank gets: it asks the others, or expects as many as last time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import RowCounts
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import Topology
from megatron_ep.normal import expert_ids
from megatron_ep.normal.handle import CountRequest

# A dispatch that is launched before its counts are known has room for a little more than the last one needed, and is
# launched again if more than this share of it would stay empty. Not measured against other numbers.
MORE_ROWS = 1 / 16
MOST_EMPTY = 1 / 8
FEW_ROWS = 64  # that do not matter in both cases


def max_arrivals(max_recv_tokens: int, expert_capacity: int, num_tokens: int, world_size: int) -> int:
    """Tokens whose output rows a rank notes when it does not ask how many arrive; those after them are left out.

    Without a capacity, so many fill max_recv_tokens rows. With one, most tokens of a busy expert may take no row: then
    it is all tokens, if no rank has more than this one.
    """
    return max_recv_tokens if expert_capacity == 0 else max(max_recv_tokens, world_size * num_tokens)


def max_rail_rows(topology: Topology, max_recv_tokens: int, arrivals: int, num_tokens: int) -> int:
    """Tokens of other nodes that pass through a rank of which it does not ask how many there are.

    If no rank has more tokens than this one, (N - 1) * T are all of them. Those of ranks that have more are known by
    where they go: each arrives at a rank of this node, which expects no more than `arrivals`.
    """
    others = topology.nodes - 1
    return min(others * max(num_tokens, max_recv_tokens), others * num_tokens + topology.ranks_per_node * arrivals)


def most(group: RankGroup, request: CountRequest, num_tokens: int) -> RowCounts:
    """Those that there is room for with max_recv_tokens, where nobody asks how many there are."""
    rows = request.max_recv_tokens
    assert rows is not None
    received = max_arrivals(rows, request.expert_capacity, num_tokens, group.topology.world_size)
    return RowCounts(num_tokens, rows, received, max_rail_rows(group.topology, rows, received, num_tokens))


def expected(group: RankGroup, request: CountRequest, num_tokens: int, is_flat: bool) -> RowCounts | None:
    """What there should be room for before the counts are known; None where they are to be known first: so if this
    rank has other tokens than last time.
    """
    last = group.last_counts
    if last is None or not group.live_backend().launches_ahead or last.num_tokens != num_tokens:
        return None
    rows, received, rail = (count + int(MORE_ROWS * count) + FEW_ROWS if count else 0 for count in last[1:])
    if is_flat:  # tables and tensors have the same rows, and what lies behind the last one is marked in both
        rows = received
    elif request.expert_capacity:
        rows = request.expert_capacity * group.num_local_experts
    return RowCounts(num_tokens, rows, received, rail)


def least_rows(room: RowCounts) -> int:
    """With fewer rows too much of it would stay empty."""
    return max(0, int((1 - MOST_EMPTY) * room.rows) - FEW_ROWS)


def known(
    group: RankGroup,
    request: CountRequest,
    topk_idx: Sequence[torch.Tensor],
    totals: Sequence[_C.Totals],
    is_flat: bool,
) -> list[RowCounts]:
    """What an exchange has told. Raises ValueError for ids that are none, and what `RankGroup.raise_if_aborted` raises.
    The next dispatch expects about as many rows as one for whose counts the host has waited."""
    for number, idx, total in zip(group.ranks, topk_idx, totals, strict=True):
        if total.bad_token >= 0:
            _refuse_ids(group, number, idx, total.bad_token, request.allows_repeats)
    group.raise_if_aborted()
    counts = []
    for idx, total in zip(topk_idx, totals, strict=True):
        rows, received, rail = total.expert_rows, total.received_rows, total.rail_rows
        if request.max_recv_tokens is not None:
            room = most(group, request, len(idx))
            if not request.has_fixed_sizes:  # the caller has the flat table, of R rows
                room = room._replace(received=room.rows if is_flat else min(received, room.received), rail=rail)
            counts.append(room)
            continue
        if not counts:
            group.last_counts = RowCounts(len(idx), rows, received, rail)
        counts.append(RowCounts(len(idx), received if is_flat else rows, received, rail))
    return counts


def _refuse_ids(group: RankGroup, rank: int, topk_idx: torch.Tensor, a_bad_token: int, allows_repeats: bool) -> None:
    backend = group.live_backend()
    # Nobody else is waiting; but a low-latency mode would lose its masks and what is under way.
    if len(group.ranks) == group.topology.world_size and not backend.parts:
        backend.reset()
    first = expert_ids.first_invalid(topk_idx, group.config.num_experts, allows_repeats)
    token = a_bad_token if first is None else first  # on a GPU the ids may have been overwritten since
    raise expert_ids.refusal(
        topk_idx, token, group.config.num_experts, rank if len(group.ranks) > 1 else None, allows_repeats
    )
