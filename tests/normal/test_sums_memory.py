"""What combine's intra-rank pass takes for its sums is bounded by what it saves, and the bits do not depend on it."""

import itertools
from unittest import mock

import pytest
import torch
from cases import drawn

import megatron_ep as ep
from megatron_ep.normal import plan


def test_sums_take_a_bounded_multiple_of_what_they_save():
    for world, topk, rows, arrivals in itertools.product(
        (1, 2, 4, 8, 16, 32, 64, 256), (1, 2, 8, 32), (0, 1, 4096, 32768), (0, 1, 4096, 32 * 4096, 64 * 4096)
    ):
        size = plan.sum_bytes_of(world, topk, rows, arrivals, 14336)
        drawn = 1 - (1 - 1 / world) ** topk  # the chance that a token comes to a rank
        saved = rows * (1 - world * drawn / topk) * 14336
        assert size in (0, arrivals * 14336) and size <= plan.MAX_SUM_BYTES * saved
    assert plan.sum_bytes_of(32, 8, 32768, 32 * 4096, 14336) == 0, "1.75 GiB to save 48 MB"
    for world, arrivals in ((8, 21504), (16, 26434)):
        assert plan.sum_bytes_of(world, 8, 32768, arrivals, 14336) == arrivals * 14336


@pytest.mark.parametrize("capacity", [None, 24])
def test_with_and_without_sums_the_bits_are_the_same(capacity):
    x, ids, _ = drawn([16] * 4, 16, 4, 64)
    results, sizes, size_of = [], [], plan.sum_bytes_of

    def spy(*arguments):
        sizes.append(size_of(*arguments))
        return sizes[-1]

    with (
        ep.LocalCluster(2, 2, ep.Config(num_experts=16, tuning=ep.Tuning(local_pass=True))) as cluster,
        mock.patch.object(plan, "sum_bytes_of", spy),
    ):
        for most in (1e9, 0):
            with mock.patch.object(plan, "MAX_SUM_BYTES", most):
                rows = ep.dispatch(x, ids, buffer=cluster, expert_capacity=capacity)
                results.append(ep.combine(rows.x, rows.handle))
    assert all(sizes[:4]) and sizes[4:] == [0] * 4
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
