"""A node of 72 ranks, the GPUs of one NVLink domain of a GB200 rack: tables of ranks and masks are wide enough."""

import pytest
import torch
from cases import assert_all_equal, drawn

import megatron_ep as ep
from megatron_ep import reference

W, HIDDEN, TOPK, MAX_TOKENS = 72, 16, 8, 4


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two"])
def cluster(request):
    with ep.LocalCluster(
        request.param, W, ep.Config(2 * W * request.param, timeout=100, max_tokens=MAX_TOKENS)
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sent(cluster):
    world = cluster.topology.world_size
    tokens = [rank % (MAX_TOKENS + 1) for rank in range(world)]
    return drawn(tokens, 2 * world, TOPK, HIDDEN, is_whole=True)


def test_normal(cluster, sent, lines):
    """A call that may have more tokens than there is memory for goes through rings."""
    x, ids, weights = sent
    rows = ep.dispatch(x, ids, weights, buffer=cluster, max_tokens=MAX_TOKENS if lines else MAX_TOKENS + 1)
    assert (rows.handle.one_hop is not None) == lines
    experts = cluster.config.num_experts
    expected, probs, counts = reference.dispatch(x, ids, weights, experts)
    for ours, of_reference in ((rows.x, expected), (rows.probs, probs), (rows.tokens_per_expert, counts)):
        assert_all_equal(ours, of_reference)
    assert_all_equal(ep.combine(rows.x, rows.handle), reference.combine(expected, ids, experts))


@pytest.mark.parametrize("on_dead_rank", ["raise", "mask"])
def test_low_latency(cluster, sent, on_dead_rank):
    x, ids, weights = sent
    sizes = {"max_tokens": MAX_TOKENS, "hidden": HIDDEN, "topk": TOPK, "dtype": torch.float32}
    low_latency = ep.LowLatency(cluster, **sizes, on_dead_rank=on_dead_rank)
    rows = low_latency.dispatch(x, ids, layout="grouped")
    expected, _, counts = reference.dispatch(x, ids, weights, cluster.config.num_experts)
    for ours, rank, count in zip(rows.x, expected, counts, strict=True):
        assert torch.equal(ours[: count.sum()], rank)
    sums = reference.combine(expected, ids, cluster.config.num_experts)
    assert_all_equal(low_latency.combine(rows.x, rows.handle, sum_at="expert"), sums)
