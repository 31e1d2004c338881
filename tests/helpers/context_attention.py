"""Causal attention over context-parallel ranks, in plain torch: Megatron's local spec refuses context parallelism, and
Transformer Engine, which has it, needs a GPU."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention


class _Gather(torch.autograd.Function):
    """[s, ...] of each rank -> [cp * s, ...], rank after rank."""

    @staticmethod
    def forward(ctx, group, own):
        ctx.group, ctx.size = group, own.shape[0]
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return None, total[ctx.group.rank() * ctx.size :][: ctx.size]


def _positions(rank, ranks, tokens):
    """In the sequence, of a rank's tokens: Megatron gives it one chunk from the front and one from the back."""
    chunk = tokens // 2
    first, second = (torch.arange(start * chunk, (start + 1) * chunk) for start in (rank, 2 * ranks - 1 - rank))
    return torch.cat([first, second])


class ContextAttention(torch.nn.Module):
    def __init__(self, config, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        """[s, b, heads, d], and [s, b, groups, d] twice -> [s, b, heads * d]"""
        group = parallel_state.get_context_parallel_group()
        ranks, tokens = group.size(), query.shape[0]
        heads_of_a_group = query.shape[2] // key.shape[2]
        query, key, value = (
            part.permute(1, 2, 0, 3)
            for part in (
                query,
                _Gather.apply(group, key).repeat_interleave(heads_of_a_group, dim=2),
                _Gather.apply(group, value).repeat_interleave(heads_of_a_group, dim=2),
            )
        )
        others = torch.cat([_positions(rank, ranks, tokens) for rank in range(ranks)])
        seen = _positions(group.rank(), ranks, tokens).unsqueeze(1) >= others
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)


def install():
    """From now on layers of a context-parallel model take it in place of Megatron's own attention."""

    def make(cls, config, *args, **kwargs):
        return ContextAttention(config, *args, **kwargs) if config.context_parallel_size > 1 else object.__new__(cls)

    DotProductAttention.__new__ = staticmethod(make)
