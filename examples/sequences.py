"""Attention of documents of very different lengths, balanced over four ranks in one process, checked against attention
at home.

    python examples/sequences.py
"""

import torch

import megatron_ep as ep
from megatron_ep.sequences import reference
from megatron_ep.sequences.dispatcher import SequenceDispatcher
from megatron_ep.sequences.plan import SequencePlan
from megatron_ep.sequences.planner import RowBytes, balance, cut_evenly

RANKS, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 8

torch.manual_seed(0)
at_home = cut_evenly([120, 20, 10, 30, 12, 64], RANKS)  # one document behind the other, equally many rows a rank
row_bytes = RowBytes(q=HEADS * WIDTH * 8, kv=2 * KV_HEADS * WIDTH * 8, out=HEADS * WIDTH * 8)
plans = [
    SequencePlan.build(shards, RANKS) for shards in (at_home, balance(at_home, RANKS, row_bytes=row_bytes, block=4))
]
for name, plan in zip(("at home", "balanced"), plans, strict=True):
    pairs = plan.attention_pairs.double()
    print(f"{name}: the busiest rank has {pairs.max() / pairs.mean():.2f} times the mean to compute")
rows = plans[0].q_rows.sum(1).tolist()
q, k, v = (
    [torch.randn(n, heads, WIDTH).double().requires_grad_() for n in rows] for heads in (HEADS, KV_HEADS, KV_HEADS)
)

results = []
with ep.LocalCluster(2, 2, ep.Config(num_experts=RANKS)) as cluster:
    dispatcher = SequenceDispatcher(cluster)
    for plan in plans:
        there = zip(*dispatcher.dispatch(q, k, v, plan), strict=True)
        out = [reference.attention(*qkv, plan.of_rank(rank)) for rank, qkv in enumerate(there)]  # or FlashAttention's
        out = dispatcher.combine(out, plan)
        results.append(out + list(torch.autograd.grad([part.square().sum() for part in out], q + k + v)))
torch.testing.assert_close(*results)
print("outputs and gradients are those of attention at home")
