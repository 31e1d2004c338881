"""DeepEP's `Buffer` between processes on GPUs, which they share where there are fewer."""

import deep_ep_checks as checks
import deep_ep_elastic_checks as elastic
import pytest
import torch
import torch.distributed as dist

from megatron_ep.tools.local_ranks import LocalRanks

W = 4


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 120) as started:
        yield started


def on_gpus(check, size, ranks_per_node=None, hidden=None):
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    groups = [dist.new_group(list(range(r, r + size))) for r in range(0, W, size)]
    device = torch.device("cuda", torch.cuda.current_device())
    with checks.nodes_of(ranks_per_node):
        return check(groups[dist.get_rank() // size], device, **({} if hidden is None else {"hidden": hidden}))


@pytest.mark.parametrize(("size", "ranks_per_node"), [(1, None), (2, None), (4, None), (4, 2)])
@pytest.mark.parametrize("hidden", [72, 2048])
def test_normal_mode(ranks, size, ranks_per_node, hidden):
    assert all(ranks.run(on_gpus, checks.check_normal, size, ranks_per_node, hidden))


def test_float8_and_repeated_experts(ranks):
    assert all(ranks.run(on_gpus, checks.check_float8, 4))


def test_number_of_sms(ranks):
    assert all(ranks.run(on_gpus, checks.check_sms, 2))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_low_latency_mode(ranks, size):
    assert all(ranks.run(on_gpus, checks.check_low_latency, size))


@pytest.mark.parametrize(("size", "ranks_per_node"), [(1, None), (2, None), (4, None), (4, 2)])
def test_elastic_buffer(ranks, size, ranks_per_node):
    assert all(ranks.run(on_gpus, elastic.check_elastic, size, ranks_per_node))


def test_masked_ranks(ranks):
    assert all(ranks.run(on_gpus, checks.check_masks, 4))
