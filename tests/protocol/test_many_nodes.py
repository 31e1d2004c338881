"""Many nodes: every role serves several of them, or more than 32 ranks, and rings of one row are always full."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep import reference

HIDDEN, TOPK = 8, 4
SLOT = 8 * 16  # a row of 8 floats with K = 4 on the wire


def tensors(world, experts, max_tokens):
    """Every other rank has tokens for a few experts only, of nodes far apart."""
    generator = torch.Generator().manual_seed(world)
    tokens = torch.randint(0, max_tokens + 1, (world,), generator=generator).tolist()
    x = [torch.randint(-9, 10, (t, HIDDEN), generator=generator).float() for t in tokens]
    ids = []
    for rank, t in enumerate(tokens):
        scores = torch.rand(t, experts, generator=generator)
        if rank % 2:
            scores[:, rank % 7 :: 7] += 1
        ids.append(scores.topk(TOPK, dim=1).indices)
    return x, ids


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "max_tokens", "rows_of_ring", "seed"),
    [
        (6, 1, 60, 1, 0),
        (6, 1, 60, 2, 1),
        (5, 2, 40, 1, 2),
        (40, 1, 6, 1, 3),
        (34, 2, 6, 1, None),
        (8, 4, 60, 1, None),
        (32, 8, 6, 1, None),
        (64, 8, 4, 2, None),
    ],
)
def test_there_and_back(nodes, ranks_per_node, max_tokens, rows_of_ring, seed):
    world = nodes * ranks_per_node
    x, ids = tensors(world, world, max_tokens)
    expected, _, _ = reference.dispatch(x, ids, [torch.ones(i.shape) for i in ids], world)
    ring = rows_of_ring * SLOT
    config = ep.Config(num_experts=world, timeout=60, tuning=ep.Tuning(nvl_ring_bytes=ring, rdma_ring_bytes=ring))
    with ep.LocalCluster(nodes, ranks_per_node, config, seed=seed) as cluster:
        rows = ep.dispatch(x, ids, buffer=cluster)
        assert all(map(torch.equal, rows.x, expected))
        again = ep.dispatch(x, ids, buffer=cluster, max_recv_tokens=max(map(len, expected)) + 1)
        assert all(torch.equal(got[: len(rest)], rest) for got, rest in zip(again.x, expected, strict=True))
        brought = ep.combine(rows.x, rows.handle)
    assert all(map(torch.equal, brought, reference.combine(expected, ids, world)))
