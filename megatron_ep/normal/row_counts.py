"""How many rows a rank gets: it asks the others, or expects as many as last time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ep.buffer.interface import CountSettings, LastCounts, RankHandle, RankTensors, RowCounts, Totals
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import Topology
from megatron_ep.normal import expert_ids
from megatron_ep.normal.handle import CountsToAskFor

# A dispatch that is launched before its counts are known has room for a little more than the last one needed, and is
# launched again if more than this share of it would stay empty. Not measured against other numbers.
MORE_ROWS = 1 / 16
MOST_EMPTY = 1 / 8
FEW_ROWS = 64  # that do not matter in both cases


@dataclass
class Asked:
    """The layouts and counts that an exchange of counts writes, a rank each, and what its launch needs."""

    layouts: list[torch.Tensor]
    counts: list[torch.Tensor]
    tensors: list[RankTensors]
    settings: CountSettings


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


def prepare(group: RankGroup, request: CountsToAskFor) -> Asked:
    backend, topk_idx = group.live_backend(), request.topk_idx
    topk, wait = topk_idx[0].shape[1], request.max_recv_tokens is None
    layouts, counts, tensors = [], [], []
    for idx in topk_idx:
        num_tokens = idx.shape[0]
        layouts.append(torch.empty(group.heap.layout_size(num_tokens, topk), dtype=torch.int32, device=group.device))
        counts.append(backend.new_counts(group.num_local_experts, wait=wait))
        tensors.append(
            {
                "layout": layouts[-1].data_ptr(),
                "num_tokens": num_tokens,
                "topk_idx": idx.data_ptr(),
                "tokens_per_expert": counts[-1].data_ptr(),
            }
        )
    settings = CountSettings(
        topk,
        topk_idx[0].element_size(),
        request.expert_alignment,
        request.expert_capacity,
        request.allows_repeats,
    )
    return Asked(layouts, counts, tensors, settings)


def expected(group: RankGroup, request: CountsToAskFor, is_flat: bool) -> RowCounts | None:
    """What there should be room for before the counts are known; None where they are to be known first: so if this
    rank has other tokens than last time, and of several ranks of a process, of which some might have to be launched
    again without the others.
    """
    last = group.last_counts
    may_guess = request.max_recv_tokens is None and group.live_backend().launches_ahead and len(group.ranks) == 1
    if last is None or not may_guess or last.num_tokens != request.topk_idx[0].shape[0]:
        return None
    rows, received, rail = (count + int(MORE_ROWS * count) + FEW_ROWS if count else 0 for count in last[1:])
    if is_flat:  # tables and tensors have the same rows, and what lies behind the last one is marked in both
        rows = received
    elif request.expert_capacity:
        rows = request.expert_capacity * group.num_local_experts
    return RowCounts(rows, received, rail)


def least_rows(room: RowCounts) -> int:
    """With fewer rows too much of it would stay empty."""
    return max(0, int((1 - MOST_EMPTY) * room.rows) - FEW_ROWS)


def exchange(group: RankGroup, request: CountsToAskFor, asked: Asked, is_flat: bool) -> tuple[list[RowCounts], bool]:
    """With max_recv_tokens the host need not wait for the counts: tables then have room for the most. Where it would
    not learn them anyway they are left to the dispatch; returns whether they are, too."""
    backend, most = group.live_backend(), request.max_recv_tokens
    is_left = most is not None and not backend.host_knows_counts
    totals = () if is_left else backend.exchange_counts(asked.tensors, asked.settings)
    if totals:
        check(group, request, totals)
    if most is None:
        return told(group, asked, totals, is_flat), False
    room = []
    for i, t in enumerate(asked.tensors):
        num_tokens = t["num_tokens"]
        received = max_arrivals(most, request.expert_capacity, num_tokens, group.topology.world_size)
        rail = max_rail_rows(group.topology, most, received, num_tokens)
        if totals and not request.has_fixed_sizes:
            received = most if is_flat else min(totals[i].received_rows, received)  # the caller has the flat table
            rail = totals[i].rail_rows
        room.append(RowCounts(most, received, rail))
    return room, is_left


def check(group: RankGroup, request: CountsToAskFor, totals: Sequence[Totals]) -> None:
    """Raises ValueError for ids that are none, and what `RankGroup.raise_if_aborted` raises."""
    for number, idx, total in zip(group.ranks, request.topk_idx, totals, strict=True):
        if total.bad_token >= 0:
            _refuse_ids(group, number, idx, total.bad_token, request.allows_repeats)
    group.raise_if_aborted()


def told(group: RankGroup, asked: Asked, totals: Sequence[Totals], is_flat: bool) -> list[RowCounts]:
    """What they say; the next dispatch expects about as many."""
    first = totals[0]
    group.last_counts = LastCounts(
        asked.tensors[0]["num_tokens"], first.expert_rows, first.received_rows, first.rail_rows
    )
    return [RowCounts(t.received_rows if is_flat else t.expert_rows, t.received_rows, t.rail_rows) for t in totals]


def ranks_of(group: RankGroup, request: CountsToAskFor, asked: Asked, room: Sequence[RowCounts]) -> list[RankHandle]:
    """With tables for so many rows."""
    made_on, ranks = group.live_backend().current_stream(), []
    for layout, counts, t, (rows, received, rail) in zip(asked.layouts, asked.counts, asked.tensors, room, strict=True):
        dst_rows = torch.empty(received, asked.settings.topk, dtype=torch.int32, device=group.device)
        rail_experts = dst_rows.new_empty(rail, asked.settings.topk) if rail else dst_rows
        rank = RankHandle(t["num_tokens"], layout, rows, counts, dst_rows, rail_experts, rail, made_on)
        rank.addresses = t
        t.update(tables_of(rank))
        if request.keeps_source_tokens:
            rank.source_tokens = dst_rows.new_empty(received)
        ranks.append(rank)
    return ranks


def cut(rank: RankHandle, counts: RowCounts) -> None:
    """Its tables to these sizes. No views, but smaller tensors in the same memory."""
    topk = rank.dst_rows.shape[1]
    rank.rows, rank.rail_rows = counts.rows, counts.rail
    rank.dst_rows.resize_(counts.received, topk)
    rank.rail_experts = rank.rail_experts.resize_(counts.rail, topk) if counts.rail else rank.dst_rows
    if rank.source_tokens is not None:
        rank.source_tokens.resize_(counts.received)
    if rank.addresses is not None:
        rank.addresses.update(tables_of(rank))


def tables_of(rank: RankHandle) -> RankTensors:
    return {
        "dst_rows": rank.dst_rows.data_ptr(),
        "rail_experts": rank.rail_experts.data_ptr(),
        "max_received": rank.dst_rows.shape[0],
        "max_rail": rank.rail_rows,
        "max_rows": rank.rows,
    }


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
