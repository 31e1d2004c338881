"""Sequences on a GPU, where it differs from the host: test_any_shape in tests/sequences runs on both."""

from dataclasses import replace

import pytest
import torch
from sequence_cases import check, many_copies

import megatron_ep as ep
from megatron_ep import overlap
from megatron_ep.errors import EPError
from megatron_ep.sequences import reference
from megatron_ep.sequences.dispatcher import SequenceDispatcher
from megatron_ep.sequences.plan import SequencePlan, Shard

PLAN = SequencePlan.build([Shard(0, i, i, 3 - i, 500) for i in range(4)], 4)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 11), (3, 9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_copies(nodes, ranks_per_node, dtype):
    case = many_copies(nodes, ranks_per_node, dtype, "cuda")
    case.config = replace(case.config, tuning=replace(case.config.tuning, channels=None))
    with case.cluster() as cluster:
        check(case, cluster, SequenceDispatcher(cluster))


def rows(width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(500, width, generator=generator).bfloat16() for _ in range(4)]


def test_200_calls_back_to_back():
    """The host waits for none of them."""
    q, k, v = rows(1024), rows(256, 1), rows(256, 2)
    expected = [x for moved in reference.dispatch(q, k, v, PLAN) for x in moved]
    with ep.LocalCluster(2, 2, ep.Config(num_experts=4, timeout=10), device="cuda") as cluster:
        dispatcher = SequenceDispatcher(cluster)
        given = [[x.cuda() for x in tensors] for tensors in (q, k, v)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            moved = dispatcher.dispatch(*given, PLAN)
            wrong += sum((a != b.cuda()).sum() for a, b in zip([x for y in moved for x in y], expected, strict=True))
            wrong += sum((a != b).sum() for a, b in zip(dispatcher.combine(moved[0], PLAN), given[0], strict=True))
        assert wrong.item() == 0


def test_beside_other_work():
    """Both halves, forward and backward, on the communication stream."""
    results = []
    with ep.LocalCluster(2, 2, ep.Config(num_experts=4, timeout=10), device="cuda") as cluster:
        dispatcher = SequenceDispatcher(cluster)
        for call in (lambda f, *args: f(*args), lambda f, *args: overlap.start(f, *args).wait()):
            leaves = [[x.cuda().requires_grad_() for x in rows(64, i)] for i in range(3)]
            q, k, v = call(dispatcher.dispatch, *leaves, PLAN)
            out = [a * (1 + b[-500:] + c[-500:]) for a, b, c in zip(q, k, v, strict=True)]
            out = call(dispatcher.combine, out, PLAN)
            sum(part.float().square().sum() for part in out).backward()
            results.append([*out, *(x.grad for tensors in leaves for x in tensors)])
        cluster.synchronize()
    assert all(map(torch.equal, *results))


def test_captured():
    """A plan's tables are made before: afterwards a graph replays the calls with other rows."""
    x = [part.cuda() for part in rows(64)]
    with ep.LocalCluster(1, 4, ep.Config(num_experts=4, timeout=10), device="cuda") as cluster:
        dispatcher = SequenceDispatcher(cluster)
        dispatcher.dispatch(x, x, x, PLAN)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moved = dispatcher.dispatch(x, x, x, PLAN)
            back = dispatcher.combine(moved[0], PLAN)
        for seed in (3, 4):
            fresh = rows(64, seed)
            for part, new in zip(x, fresh, strict=True):
                part.copy_(new)
            graph.replay()
            cluster.synchronize()
            for ours, expected in zip(moved, reference.dispatch(fresh, fresh, fresh, PLAN), strict=True):
                assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, expected, strict=True))
            assert all(torch.equal(a.cpu(), b) for a, b in zip(back, fresh, strict=True))


def test_a_failed_call_is_no_data():
    """Nobody can take its outputs for rows, and after a reset the plan can be used again."""
    x = [part.cuda() for part in rows(64)]
    with ep.LocalCluster(1, 4, ep.Config(num_experts=4, timeout=1), device="cuda") as cluster:
        dispatcher = SequenceDispatcher(cluster)
        cluster.abort("a test")
        with pytest.raises(EPError, match="was told to stop: a test"):
            dispatcher.dispatch(x, x, x, PLAN)
        cluster.reset()
        back = dispatcher.combine(dispatcher.dispatch(x, x, x, PLAN)[0], PLAN)
        assert all(map(torch.equal, back, x))
