"""Rings of one and two rows, which are always full: hundreds of rows of every rank, or many nodes, of which every role
serves several, or more than 32 ranks."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep import reference

HIDDEN, TOPK = 8, 4
SLOT = 8 * 16  # a row of 8 floats with K = 4 on the wire
FEW = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]


def tensors(world, experts, tokens):
    """Every other rank's tokens are for a few experts only, of nodes far apart."""
    generator = torch.Generator().manual_seed(world)
    x = [torch.randint(-9, 10, (t, HIDDEN), generator=generator).float() for t in tokens]
    ids = []
    for rank, t in enumerate(tokens):
        scores = torch.rand(t, experts, generator=generator)
        if rank % 2 and world > 4:
            scores[:, rank % 7 :: 7] += 1
        ids.append(scores.topk(TOPK, dim=1).indices)
    return x, ids, [torch.rand(t, TOPK, generator=generator) for t in tokens]


def cluster(nodes, ranks_per_node, rows_of_ring, experts, **options):
    ring = rows_of_ring * SLOT
    config = ep.Config(num_experts=experts, timeout=60, tuning=ep.Tuning(nvl_ring_bytes=ring, rdma_ring_bytes=ring))
    return ep.LocalCluster(nodes, ranks_per_node, config, **options)


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "max_tokens", "rows_of_ring", "seed"),
    [
        *((*few, 1024, rows_of_ring, seed) for few in FEW for rows_of_ring in (1, 2) for seed in (None, 0)),
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
    experts, fewest = (8, 500) if world <= 4 else (world, 0)
    random = torch.Generator().manual_seed(world)
    tokens = torch.randint(fewest, max_tokens + 1, (world,), generator=random).tolist()
    x, ids, weights = tensors(world, experts, tokens)
    expected, probs, _ = reference.dispatch(x, ids, weights, experts)
    with cluster(nodes, ranks_per_node, rows_of_ring, experts, seed=seed) as buffer:
        rows = ep.dispatch(x, ids, weights, buffer=buffer)
        assert all(map(torch.equal, rows.x, expected)) and all(map(torch.equal, rows.probs, probs))
        again = ep.dispatch(x, ids, buffer=buffer, max_recv_tokens=max(map(len, expected)) + 1)
        assert all(torch.equal(got[: len(rest)], rest) for got, rest in zip(again.x, expected, strict=True))
        assert all(map(torch.equal, ep.combine(rows.x, rows.handle), reference.combine(expected, ids, experts)))


@pytest.mark.parametrize("lost", [3, 4, 5, 50, 51, 500, 501])
def test_every_row_needs_its_credit(lost):
    """Signals 1 and 2 carry counts. With any later one lost, be it of a row or of a credit, the call cannot end."""
    x, ids, weights = tensors(2, 8, (512, 1024))
    with (
        cluster(2, 1, 1, 8, seed=lost, lost_signal=lost) as buffer,
        pytest.raises(ep.EPTimeoutError, match="a network ring"),
    ):
        ep.dispatch(x, ids, weights, buffer=buffer)
