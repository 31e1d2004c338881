"""Attention of rows that were moved by a plan is the causal attention of each document, and so are its gradients."""

import pytest
import torch

from megatron_ep.sequences import reference
from megatron_ep.sequences.plan import SequencePlan, Shard

PLANS = {
    "one document over all ranks": ([Shard(0, i, i, 3 - i, 5 + i) for i in range(4)], 4),
    "all on one rank": ([Shard(d, i, (d + i) % 3, 1, 4 + d) for d in range(3) for i in range(2)], 3),
    "contexts that overlap": ([Shard(0, i, 0, i % 2, 3) for i in range(5)] + [Shard(1, 0, 1, 0, 4)], 2),
    "one shard": ([Shard(0, 0, 1, 0, 7)], 2),
    "no rows": ([], 2),
    "more than nine copies": ([Shard(0, i, 10 - i, i, 2) for i in range(11)] + [Shard(1, 0, 0, 5, 6)], 11),
    "at home": ([Shard(d, 0, d, d, 5 - d) for d in range(3)], 3),
}
# heads, KV heads, width of Q and K, width of V
WIDTHS = {"MHA": (2, 2, 4, 4), "GQA": (6, 2, 4, 4), "MLA": (3, 3, 6, 4)}

by_plan = pytest.mark.parametrize("plan", PLANS)


def documents(shards, per_rank):
    """Each document's rows, in order, from those of the ranks at home."""
    next_row, rows = [0] * len(per_rank), {}
    for shard in sorted(shards, key=lambda shard: (shard.document, shard.index)):
        first = next_row[shard.home_rank]
        next_row[shard.home_rank] += shard.length
        rows.setdefault(shard.document, []).append(per_rank[shard.home_rank][first : first + shard.length])
    return [torch.cat(parts) for parts in rows.values()]


def full_attention(q, k, v):
    """torch's own, of one document."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


@pytest.mark.numerical
@by_plan
@pytest.mark.parametrize("widths", WIDTHS)
def test_dispatched_attention_is_full_causal_attention(plan, widths):
    shards, world = PLANS[plan]
    heads, kv_heads, width, v_width = WIDTHS[widths]
    plan = SequencePlan.build(shards, world)
    random = torch.Generator().manual_seed(0)

    def rows(*shape):
        counts = [plan.of_rank(rank).num_rows for rank in range(world)]
        return [torch.randn(n, *shape, dtype=torch.float64, generator=random).requires_grad_() for n in counts]

    q, k, v, weight = rows(heads, width), rows(kv_heads, width), rows(kv_heads, v_width), rows(heads, v_width)
    moved = zip(*reference.dispatch(q, k, v, plan), strict=True)
    out = reference.combine([reference.attention(*qkv, plan.of_rank(rank)) for rank, qkv in enumerate(moved)], plan)
    expected = [full_attention(*qkv) for qkv in zip(*(documents(shards, x) for x in (q, k, v)), strict=True)]
    for ours, theirs in zip(documents(shards, out), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)

    if not shards:
        return
    leaves = [*q, *k, *v]
    ours = torch.autograd.grad(sum((a * b).sum() for a, b in zip(out, weight, strict=True)), leaves)
    pairs = zip(expected, documents(shards, weight), strict=True)
    theirs = torch.autograd.grad(sum((a * b).sum() for a, b in pairs), leaves, materialize_grads=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.numerical
@by_plan
def test_gradients_of_k_and_v_are_sums_of_copies(plan):
    shards, world = PLANS[plan]
    plan = SequencePlan.build(shards, world)
    tables = [plan.of_rank(rank) for rank in range(world)]
    random = torch.Generator().manual_seed(1)
    k = [torch.zeros(table.num_rows, 3, dtype=torch.float64, requires_grad=True) for table in tables]
    grad = [torch.randn(table.num_kv_rows, 3, dtype=torch.float64, generator=random) for table in tables]
    _, moved, _ = reference.dispatch(k, k, k, plan)
    expected = torch.autograd.grad(moved, k, grad)
    for ours, theirs in zip(reference.sum_copies(grad, plan), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_copies_are_added_in_the_order_of_ranks_and_rounded_once():
    """In bfloat16, or in another order, 1 would be lost beside 2^24."""
    plan = SequencePlan.build([Shard(0, i, 0, i, 1) for i in range(4)], 4)
    terms = [2.0**24, 1.0, -(2.0**24), 1.0]  # of the first row; in float32 2^24 + 1 is 2^24
    grad = [torch.full((rank + 1, 1), terms[rank], dtype=torch.bfloat16) for rank in range(4)]
    assert reference.sum_copies(grad, plan)[0][0].item() == 1.0
    assert reference.sum_copies([rows.double() for rows in grad], plan)[0][0].item() == 2.0
    small = [torch.full((rank + 1, 1), 1 + 2.0**-7 * rank, dtype=torch.bfloat16) for rank in range(4)]
    assert reference.sum_copies(small, plan)[0][0].item() == torch.tensor(4 + 6 * 2.0**-7).bfloat16().item()
