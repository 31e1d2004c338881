"""Rings of one and two rows under hundreds of rows of every rank, so that nearly every row needs a credit."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep import reference

TOKENS, HIDDEN, TOPK = (512, 1024, 700, 513), 8, 3
SLOT = 7 * 16  # a row of 8 floats with K = 3 on the wire


def tensors(world, experts):
    generator = torch.Generator().manual_seed(world)
    x = [torch.randint(-9, 10, (t, HIDDEN), generator=generator).float() for t in TOKENS[:world]]
    ids = [torch.rand(t, experts, generator=generator).topk(TOPK, dim=1).indices for t in TOKENS[:world]]
    weights = [torch.rand(t, TOPK, generator=generator) for t in TOKENS[:world]]
    return x, ids, weights


def cluster(nodes, ranks_per_node, rows_of_ring, **options):
    config = ep.Config(
        num_experts=8,
        timeout=20,
        tuning=ep.Tuning(nvl_ring_bytes=rows_of_ring * SLOT, rdma_ring_bytes=rows_of_ring * SLOT),
    )
    return ep.LocalCluster(nodes, ranks_per_node, config, **options)


@pytest.mark.parametrize("rows_of_ring", [1, 2])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("seed", [None, 0])
def test_there_and_back(nodes, ranks_per_node, rows_of_ring, seed):
    x, ids, weights = tensors(nodes * ranks_per_node, 8)
    expected, probs, _ = reference.dispatch(x, ids, weights, 8)
    with cluster(nodes, ranks_per_node, rows_of_ring, seed=seed) as buffer:
        rows = ep.dispatch(x, ids, weights, buffer=buffer)
        assert all(map(torch.equal, rows.x, expected)) and all(map(torch.equal, rows.probs, probs))
        assert all(map(torch.equal, ep.combine(rows.x, rows.handle), reference.combine(expected, ids, 8)))


@pytest.mark.parametrize("lost", [3, 4, 5, 50, 51, 500, 501])
def test_every_row_needs_its_credit(lost):
    """Signals 1 and 2 carry counts. With any later one lost, be it of a row or of a credit, the call cannot end."""
    x, ids, weights = tensors(2, 8)
    with (
        cluster(2, 1, 1, seed=lost, lost_signal=lost) as buffer,
        pytest.raises(ep.EPTimeoutError, match="a network ring"),
    ):
        ep.dispatch(x, ids, weights, buffer=buffer)
