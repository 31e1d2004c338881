"""The specification of moving Q, K and V by a plan, for all ranks at once, in plain torch.

Lists have one entry per rank. A row may have any shape and dtype. All functions are differentiable; `sum_copies` gives
the gradients of K and V to the last bit.
"""

from __future__ import annotations

import functools
import itertools

import torch

from megatron_ep.config import MAX_TOPK
from megatron_ep.sequences.plan import RankTables, Routes, SequencePlan


def dispatch(
    q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor], plan: SequencePlan
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Takes q, k and v, [T, ...] on the home ranks; returns the rows that arrive on the attention ranks,
    [num_q_rows, ...] and twice [num_kv_rows, ...] of `RankTables`."""
    tables = [plan.of_rank(rank) for rank in range(plan.world)]
    q_routes, kv_routes = [table.q for table in tables], [table.kv for table in tables]
    num_kv_rows = [table.num_kv_rows for table in tables]
    return (
        _move(q, q_routes, [table.num_q_rows for table in tables]),
        _move(k, kv_routes, num_kv_rows),
        _move(v, kv_routes, num_kv_rows),
    )


def combine(out: list[torch.Tensor], plan: SequencePlan) -> list[torch.Tensor]:
    """Takes out, [num_q_rows, ...] on the attention ranks; returns it on the home ranks, [T, ...]."""
    tables = [plan.of_rank(rank) for rank in range(plan.world)]
    return _move(out, [table.out for table in tables], [table.num_rows for table in tables])


def sum_copies(grad: list[torch.Tensor], plan: SequencePlan, ranks_per_node: int | None = None) -> list[torch.Tensor]:
    """Takes gradients of the rows of K, or V, that arrived, [num_kv_rows, ...]; returns those at home, [T, ...].

    The copies of a row are summed in float32 (float64 for float64), in the order of the ranks that have them, and
    rounded once. The copies on another node than home are summed among themselves first; their sum takes the place of
    the first of them. More than 32 copies are summed in parts of at most 32, in which nodes of at most 32 copies stay
    whole, and then these sums.

    ranks_per_node: ranks of a node. None: all ranks are one node.
    """
    on_node, most = ranks_per_node or plan.world, MAX_TOPK
    wide = torch.float64 if grad[0].dtype == torch.float64 else torch.float32
    tables = [plan.of_rank(rank) for rank in range(plan.world)]

    def total(terms: list[torch.Tensor]) -> torch.Tensor:
        return functools.reduce(torch.add, terms)

    def total_of_some(copies: list[tuple[int, torch.Tensor]], home: int) -> torch.Tensor:
        terms = []
        for node, of_node in itertools.groupby(copies, lambda copy: copy[0] // on_node):
            rows = [row for _, row in of_node]
            terms += rows if node == home // on_node else [total(rows)]
        return total(terms)

    sums = []
    for home, table in enumerate(tables):
        sums.append(torch.empty(table.num_rows, *grad[0].shape[1:], dtype=grad[0].dtype))
        for first, length, ranks, places in zip(*(x.tolist() for x in table.kv), strict=True):
            parts: list[list[tuple[int, torch.Tensor]]] = [[]]
            copies = [(r, grad[r][p : p + length].to(wide)) for r, p in zip(ranks, places, strict=True) if r >= 0]
            for _, of_node in itertools.groupby(copies, lambda copy: copy[0] // on_node):
                rows = list(of_node)
                if parts[-1] and len(parts[-1]) + len(rows) > most:
                    parts.append([])
                for row in rows:
                    if len(parts[-1]) == most:
                        parts.append([])
                    parts[-1].append(row)
            sums[home][first : first + length] = total([total_of_some(part, home) for part in parts])
    return sums


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: RankTables) -> torch.Tensor:
    """Returns causal attention of one rank's segments, [num_q_rows, heads, width of v].

    q [num_q_rows, heads, D], k [num_kv_rows, KV heads, D] and v [num_kv_rows, KV heads, width] are results of dispatch;
    heads are a multiple of KV heads. Scores are divided by the square root of D.
    """
    if tables.context_rows is not None:
        k, v = k[tables.context_rows], v[tables.context_rows]
    q_sizes, k_sizes = tables.cu_seqlens_q.diff().tolist(), tables.cu_seqlens_k.diff().tolist()
    out = [q.new_empty(0, q.shape[1], v.shape[2])]
    for queries, keys, values in zip(q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True):
        group = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / queries.shape[2] ** 0.5
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(len(keys) - len(queries) + 1)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(dim=2), values))
    return torch.cat(out)


def _move(rows: list[torch.Tensor], routes: list[Routes], num_received: list[int]) -> list[torch.Tensor]:
    """Copies rows to all destinations in their routes."""
    all_rows, per_row = torch.cat(rows), [route.per_row() for route in routes]
    rank, place = (torch.cat(columns) for columns in zip(*per_row, strict=True))
    received = []
    for dst, count in enumerate(num_received):
        source, column = (rank == dst).nonzero(as_tuple=True)
        arrived = place[source, column].long()
        assert torch.equal(arrived.sort().values, torch.arange(count)), "a place that no row or several are sent to"
        received.append(all_rows[source[arrived.argsort()]])
    return received
