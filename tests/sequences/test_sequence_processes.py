"""Sequences between processes: skewed ranks, several machines, and what the others hear of a rank that is at odds."""

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist
from forced_machines import machines_of
from run_on import run_on
from sequence_cases import Case, random_plan

import megatron_ep as ep
from megatron_ep.sequences import reference
from megatron_ep.sequences.dispatcher import SequenceDispatcher
from megatron_ep.sequences.plan import SequencePlan, Shard

W, TIMEOUT = 4, 3.0
PLAN = SequencePlan.build([Shard(0, i, i, 3 - i, 5) for i in range(W)], W)


def round_trip(dispatcher, case):
    rank = dist.get_rank()
    inputs, gradients = case.inputs(), case.gradients()
    leaves = [tensors[rank].clone().requires_grad_() for tensors in inputs]
    moved = dispatcher.dispatch(*leaves, case.plan)
    assert all(map(torch.equal, moved, [x[rank] for x in reference.dispatch(*inputs, case.plan)]))
    grads = torch.autograd.grad(moved, leaves, [x[rank] for x in gradients])
    assert all(map(torch.equal, grads, [x[rank] for x in case.expected_gradients(gradients)]))
    assert torch.equal(dispatcher.combine(moved[0], case.plan), inputs[0][rank])


@pytest.mark.parametrize(("nodes", "ranks_per_machine"), [(1, 0), (2, 0), (4, 0), (2, 2), (4, 1), (4, 2)])
@run_on("four_ranks")
def test_processes(nodes, ranks_per_machine):
    with machines_of(ranks_per_machine) if ranks_per_machine else contextlib.nullcontext():
        config = ep.Config(num_experts=W, timeout=20, tuning=ep.Tuning(nvl_ring_bytes=1 << 14, rdma_ring_bytes=1 << 14))
        with ep.Buffer(None, config, ep.Topology(nodes, W // nodes)) as buffer:
            assert buffer.fabric == ("tcp" if ranks_per_machine else "shared memory")
            dispatcher = SequenceDispatcher(buffer)
            for seed in range(8):
                case = Case(seed)
                case.nodes, case.ranks_per_node, case.world = nodes, W // nodes, W
                case.plan = random_plan(W, random.Random(seed))
                round_trip(dispatcher, case)


@run_on("four_ranks")
def test_200_calls_of_skewed_ranks():
    """Nothing is cleared between calls: a rank may be calls ahead of another, or behind it."""
    rank, r = dist.get_rank(), random.Random(dist.get_rank())
    q = [torch.arange(5.0).view(5, 1) + 100 * source for source in range(W)]
    moved = [x[rank] for x in reference.dispatch(q, q, q, PLAN)]
    with ep.Buffer(None, ep.Config(num_experts=W, timeout=20), ep.Topology(2, 2)) as buffer:
        dispatcher = SequenceDispatcher(buffer)
        for call in range(200):
            if r.random() < 0.1:
                time.sleep(r.random() * 0.02)
            x = q[rank] + call
            there = dispatcher.dispatch(x, x, x, PLAN)
            assert all(torch.equal(a, b + call) for a, b in zip(there, moved, strict=True)), call
            assert torch.equal(dispatcher.combine(there[0], PLAN), x), call


def run_at_odds(kind):
    """Rank 2 is. What each rank hears, and whether all can go on after a reset."""
    rank, x = dist.get_rank(), torch.ones(5, 3)
    with ep.Buffer(None, ep.Config(num_experts=W, timeout=TIMEOUT), ep.Topology(2, 2)) as buffer:
        dispatcher = SequenceDispatcher(buffer)
        dispatcher.combine(dispatcher.dispatch(x, x, x, PLAN)[0], PLAN)
        dist.barrier()
        said = ""
        if rank != 2 or kind != "absent":
            plan = PLAN
            if rank == 2 and kind == "another plan":
                shards = [Shard(0, 0, 0, 3, 5), Shard(0, 1, 1, 2, 5), Shard(0, 2, 2, 0, 5), Shard(0, 3, 3, 1, 5)]
                plan = SequencePlan.build(shards, W)
            try:
                dispatcher.dispatch(x[:4] if rank == 2 and kind == "a mistake" else x, x, x, plan)
                dispatcher.dispatch(x, x, x, plan)  # a rank that needed nothing of rank 2 hears of it now
            except (ValueError, ep.EPError) as error:
                said = f"{type(error).__name__}: {error}"
        dist.barrier()  # until then an absent rank stays away
        buffer.reset()
        y = torch.arange(15.0).view(5, 3)
        assert torch.equal(dispatcher.combine(dispatcher.dispatch(y, y, y, PLAN)[0], PLAN), y)
        return said


def test_a_mistake_of_one_rank_reaches_all(four_ranks):
    said = four_ranks.run(run_at_odds, "a mistake")
    assert said[2] == "ValueError: q has shape (4, 3), must be [5, H] with H >= 1"
    assert all("rank 2 refused its arguments: q has shape (4, 3)" in said[rank] for rank in (0, 1, 3)), said


def test_an_absent_rank_is_named(four_ranks):
    said = four_ranks.run(run_at_odds, "absent")
    assert said[2] == ""
    assert all("rank 2 has not entered call 4 (it finished 3)" in said[rank] for rank in (0, 1, 3)), said
    assert any("EPTimeoutError" in line for line in said)


def test_another_plan_is_noticed(four_ranks):
    """Rows are never taken for those of another plan."""
    said = four_ranks.run(run_at_odds, "another plan")
    assert all("met a row that was not meant for its call" in line for line in said), said
    sent = "sent a dispatch by a plan, H = 3, float32, K = 1"
    by_all, by_some = f"all {sent}, but by different plans", f"{sent}; what the others sent is not known here"
    assert all(by_all in line or by_some in line for line in said), said  # some may not have come to the call by then
