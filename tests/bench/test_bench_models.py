"""`run.py models` without a GPU: whose passes it times, and that their results are compared. Nothing here judges a
time."""

import bench_models as models
import pytest
import torch

from megatron_ep import megatron as megatron_side
from megatron_ep.tools.local_ranks import LocalRanks

CASES = [models.Case("small", 64, 8, 2, tokens) for tokens in (5, 16)]


@pytest.mark.skipif(not megatron_side.is_installed(), reason="megatron-core is not installed")
def test_every_implementation_is_timed():
    with LocalRanks(2, 60) as ranks:
        by_rank = ranks.run(models.measure, CASES, "cpu", 1, 3)
    assert [len(cases) for cases in by_rank] == [2, 2]
    for measured in by_rank[0] + by_rank[1]:
        assert [each.implementation for each in measured] == ["ours", "ours_topk_router", "megatron_alltoall"]
        assert all(len(each.seconds) == 3 and min(each.seconds) > 0 for each in measured)


@pytest.mark.parametrize("part", range(5))
def test_other_results_are_not_timed(part):
    def results():
        return [torch.arange(6.0).view(3, 2) + 1 for _ in range(5)]

    wrong = results()
    wrong[part] = wrong[part] * 2
    models._check_equal({"ours": results(), "megatron_alltoall": results()})
    with pytest.raises(AssertionError, match=r"^ours (rows|probs|output|x\.grad|probs\.grad): "):
        models._check_equal({"ours": wrong, "megatron_alltoall": results()})
