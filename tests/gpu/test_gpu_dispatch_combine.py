"""Dispatch and combine on a GPU, where it differs from the host: the tests that both share are in tests/normal."""

import pytest
import torch
from cases import assert_all_equal

import megatron_ep as ep
from megatron_ep.buffer.arguments import summable_dtypes

SUMMABLE = summable_dtypes("cuda")


def to_gpu(tensors):
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 8), (2, 4)])
def test_whole_rows_with_the_default_channels(nodes, ranks_per_node):
    """Rows long enough for the copy engine, all SMs, rings that wrap around many times."""
    world, experts, topk, hidden = nodes * ranks_per_node, 64, 8, 7168
    generator = torch.Generator().manual_seed(0)
    tokens = [700 + 10 * rank for rank in range(world)]
    ids = [torch.rand(t, experts, generator=generator).topk(topk, dim=1).indices for t in tokens]
    x = [torch.randn(t, hidden, generator=generator).bfloat16() for t in tokens]
    config = ep.Config(
        num_experts=experts, timeout=20, tuning=ep.Tuning(nvl_ring_bytes=64 << 10, rdma_ring_bytes=128 << 10)
    )
    with (
        ep.LocalCluster(nodes, ranks_per_node, config) as host,
        ep.LocalCluster(nodes, ranks_per_node, config, device="cuda") as gpu,
    ):
        expected = ep.dispatch(x, ids, buffer=host)
        y = ep.combine(expected.x, expected.handle)
        weights = [torch.randn(len(rows), generator=generator) for rows in expected.x]
        weighted = ep.combine(expected.x, expected.handle, weights)
        for _ in range(3):
            ours = ep.dispatch(to_gpu(x), to_gpu(ids), buffer=gpu)
            assert_all_equal(ours.x, expected.x)
            assert_all_equal(ep.combine(ours.x, ours.handle), y)
            assert_all_equal(ep.combine(ours.x, ours.handle, to_gpu(weights)), weighted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_types_that_were_not_built_are_refused(dtype):
    if dtype in SUMMABLE:
        pytest.skip(f"this build sums {dtype}")
    x, ids = torch.ones(3, 8, dtype=dtype, device="cuda"), torch.arange(3, device="cuda").unsqueeze(1)
    with ep.LocalCluster(1, 1, ep.Config(num_experts=4, timeout=20), device="cuda") as cluster:
        rows = ep.dispatch([x], [ids], buffer=cluster)
        assert torch.equal(rows.x[0], x)  # moves bytes
        with pytest.raises(ValueError, match=f"x is {dtype}, must be one of .* MEGATRON_EP_DTYPES=all"):
            ep.combine(rows.x, rows.handle)
