"""The specification: what moving Q, K and V by a plan yields, for all ranks at once, in plain torch.

Lists have one entry per rank. A row may have any shape and dtype. All of it can be differentiated by torch; what the
gradients of K and V are to the last bit says `sum_copies`.
"""

from __future__ import annotations

import torch

from megatron_ep.sequences.plan import RankTables, Routes, SequencePlan


def dispatch(
    q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor], plan: SequencePlan
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """q, k and v, [T, ...] on the home ranks, to the rows that arrive on the attention ranks: [num_q_rows, ...] and
    twice [num_kv_rows, ...] of `RankTables`."""
    tables = [plan.of_rank(rank) for rank in range(plan.world)]
    q_routes, kv_routes = [table.q for table in tables], [table.kv for table in tables]
    num_kv_rows = [table.num_kv_rows for table in tables]
    return (
        _move(q, q_routes, [table.num_q_rows for table in tables]),
        _move(k, kv_routes, num_kv_rows),
        _move(v, kv_routes, num_kv_rows),
    )


def combine(out: list[torch.Tensor], plan: SequencePlan) -> list[torch.Tensor]:
    """out, [num_q_rows, ...] on the attention ranks, to the home ranks: [T, ...]."""
    tables = [plan.of_rank(rank) for rank in range(plan.world)]
    return _move(out, [table.out for table in tables], [table.num_rows for table in tables])


def sum_copies(grad: list[torch.Tensor], plan: SequencePlan) -> list[torch.Tensor]:
    """Gradients of the rows of K, or V, that arrived, [num_kv_rows, ...], to those of the rows at home, [T, ...].

    The sum over a row's copies: in float32 (float64 for float64), beginning with 0, in the order of the ranks that have
    them, rounded once.
    """
    tables = [plan.of_rank(rank) for rank in range(plan.world)]
    wide = torch.float64 if grad[0].dtype == torch.float64 else torch.float32
    sums = [grad[0].new_zeros(table.num_rows, *grad[0].shape[1:], dtype=wide) for table in tables]
    for rows, table in zip(grad, tables, strict=True):
        home, home_row = (x[:, 0] for x in table.kv_grad.per_row())
        for rank in range(plan.world):
            sums[rank][home_row[home == rank]] += rows[home == rank].to(wide)
    return [rows.to(grad[0].dtype) for rows in sums]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: RankTables) -> torch.Tensor:
    """Causal attention of one rank's segments, [num_q_rows, heads, width of v].

    q [num_q_rows, heads, D], k [num_kv_rows, KV heads, D] and v [num_kv_rows, KV heads, width] as dispatch gives them;
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
    """Rows to every place that their routes name."""
    all_rows, per_row = torch.cat(rows), [route.per_row() for route in routes]
    rank, place = (torch.cat(columns) for columns in zip(*per_row, strict=True))
    received = []
    for dst, count in enumerate(num_received):
        source, column = (rank == dst).nonzero(as_tuple=True)
        arrived = place[source, column].long()
        assert torch.equal(arrived.sort().values, torch.arange(count)), "a place that no row or several are sent to"
        received.append(all_rows[source[arrived.argsort()]])
    return received
