"""A Mixture-of-Experts layer over four ranks in one process, checked against the same layer in plain torch.

    python examples/local_cluster.py

Four ranks on two nodes, eight experts, a matrix each. Nothing is launched and no GPU is needed.
"""

import torch

import megatron_ep as ep

NODES, RANKS_PER_NODE, EXPERTS, TOPK, HIDDEN = 2, 2, 8, 2, 16
RANKS = NODES * RANKS_PER_NODE

torch.manual_seed(0)
experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, dtype=torch.float64) / HIDDEN**0.5
tokens = [torch.randn(5 + rank, HIDDEN, dtype=torch.float64, requires_grad=True) for rank in range(RANKS)]
scores = [torch.rand(len(x), EXPERTS, dtype=torch.float64).softmax(dim=1).topk(TOPK, dim=1) for x in tokens]
ids, weights = [s.indices for s in scores], [s.values for s in scores]


def dense_layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """y[token] = sum over k of weight[k] * experts[id[k]] x[token]."""
    return torch.einsum("tk,tkij,tj->ti", weights, experts[ids], x)


with ep.LocalCluster(NODES, RANKS_PER_NODE, ep.Config(num_experts=EXPERTS)) as cluster:
    received = ep.dispatch(tokens, ids, weights, buffer=cluster)
    outputs = []
    for rank in range(RANKS):  # each rank runs its own experts on the rows that came for them
        counts = received.tokens_per_expert[rank].tolist()
        print(f"rank {rank}: {len(tokens[rank])} tokens sent, {counts} rows received for its {len(counts)} experts")
        own = experts[rank * len(counts) : (rank + 1) * len(counts)]
        rows = received.x[rank].split(counts)
        outputs.append(torch.cat([part @ matrix.T for part, matrix in zip(rows, own, strict=True)]))
    y = ep.combine(outputs, received.handle, weights=received.probs)
    sum(part.square().sum() for part in y).backward()

gradients = [x.grad for x in tokens]
for x in tokens:
    x.grad = None
expected = [dense_layer(*arguments) for arguments in zip(tokens, ids, weights, strict=True)]
sum(part.square().sum() for part in expected).backward()

torch.testing.assert_close(y, expected)
torch.testing.assert_close(gradients, [x.grad for x in tokens])
print("outputs and gradients are those of the dense layer")
