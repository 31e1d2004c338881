"""What `tests/bench/run.py sequences` measures beside the dispatcher: the same rows by torch.distributed's all-to-all,
and attention of the rows that a rank then has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sequence_case import Case
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from megatron_ep.sequences import reference
from megatron_ep.sequences.plan import Moves, RankTables, SequencePlan

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class AllToAll:
    """Rows by a plan's moves: into the order of the ranks that they go to, all-to-all, and to their places.

    send: int64, the number of each row that is sent. place: int64, of each row of the output, where it arrived.
    sent, received: rows to and from each rank. num_rows: at home. is_sum: whether a row may have gone to several ranks.
    """

    send: torch.Tensor
    place: torch.Tensor
    sent: list[int]
    received: list[int]
    num_rows: int
    is_sum: bool
    group: dist.ProcessGroup

    @classmethod
    def build(
        cls, moves: Moves, plan: SequencePlan, rank: int, group: dist.ProcessGroup, *, is_sum: bool, device: str
    ) -> AllToAll:
        """moves: of the plan."""

        def rows(begin: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            start = length.cumsum(0) - length
            return torch.arange(int(length.sum())) + (begin - start).repeat_interleave(length)

        def by_rank(which: torch.Tensor, peer: torch.Tensor, begin: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
            order = which.nonzero()[:, 0]
            order = order[peer[order].argsort(stable=True)]
            length = moves.length[order]
            counts = torch.zeros(plan.world, dtype=torch.int64).index_add_(0, peer[order], length)
            return rows(begin[order], length), counts.tolist()

        send, sent = by_rank(moves.src_rank == rank, moves.dst_rank, moves.src_row)
        arrived, received = by_rank(moves.dst_rank == rank, moves.src_rank, moves.dst_row)
        num_rows = int(plan.q_rows[rank].sum())
        return cls(send.to(device), arrived.argsort().to(device), sent, received, num_rows, is_sum, group)

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, ...] to what arrives. Differentiable once, as `back` is."""
        out: torch.Tensor = Linear.apply(self._there, self._back, x)
        return out

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """What arrived to [num_rows, ...]; sums, in float32, where a row went to several ranks."""
        sums: torch.Tensor = Linear.apply(self._back, self._there, rows)
        return sums

    def _there(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange(x.index_select(0, self.send), self.sent, self.received).index_select(0, self.place)

    def _back(self, rows: torch.Tensor) -> torch.Tensor:
        ordered = torch.empty_like(rows).index_copy_(0, self.place, rows)
        returned = self._exchange(ordered, self.received, self.sent)
        if not self.is_sum:
            return torch.empty_like(returned).index_copy_(0, self.send, returned)
        sums = torch.zeros(self.num_rows, *rows.shape[1:], device=rows.device, dtype=torch.float32)
        return sums.index_add_(0, self.send, returned.float()).to(rows.dtype)

    def _exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x, received, sent, group=self.group)
        return out


class Linear(torch.autograd.Function):
    """A move and its transpose."""

    @staticmethod
    def forward(ctx: Any, move: Move, transpose: Move, x: torch.Tensor) -> torch.Tensor:
        ctx.transpose = transpose
        return move(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, ctx.transpose(grad.contiguous())


# ---- attention


def attention_of(case: Case, tables: RankTables, kernel: str) -> Attention:
    """Causal attention of a rank's segments: (q, k, v) as a dispatch gives them to the output, shaped as q. kernel: of
    `kernel_of`."""
    if kernel == "plain torch":
        return lambda q, k, v: reference.attention(q, k, v, tables)
    context_rows = None if tables.context_rows is None else tables.context_rows.to(case.device)
    inner = _transformer_engine(case, tables) if kernel == "Transformer Engine" else _flash(tables)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if context_rows is not None:
            k, v = k[context_rows], v[context_rows]
        return inner(q, k, v)

    return attend


def kernel_of(case: Case) -> str:
    """What computes attention: on a GPU Transformer Engine where it is installed, else torch's flash attention, segment
    by segment; plain torch on the host."""
    if case.device == "cpu":
        return "plain torch"
    return "Transformer Engine" if importlib.util.find_spec("transformer_engine") else "torch's flash attention"


def _transformer_engine(case: Case, tables: RankTables) -> Attention:
    attention = importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        case.query_heads,
        case.width,
        num_gqa_groups=case.kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
    )
    sequences = dict(
        cu_seqlens_q=tables.cu_seqlens_q.to(case.device),
        cu_seqlens_kv=tables.cu_seqlens_k.to(case.device),
        max_seqlen_q=tables.max_seqlen_q,
        max_seqlen_kv=tables.max_seqlen_k,
    )
    return lambda q, k, v: attention(q, k, v, **sequences).view(q.shape)


def _flash(tables: RankTables) -> Attention:
    q_sizes, k_sizes = tables.cu_seqlens_q.diff().tolist(), tables.cu_seqlens_k.diff().tolist()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = []
        for segment in zip(q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True):
            queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in segment)
            mask = causal_lower_right(queries.shape[2], keys.shape[2])
            rows = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
            out.append(rows[0].transpose(0, 1))
        return torch.cat(out)

    return attend
