"""Each fabric between the GPUs of one machine, a process for each. Nodes are as many as the case says."""

import os
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from cases import slot_bytes, summed_on_gpus
from test_gpu_processes import inputs, make_buffer, round_trips

import megatron_ep as ep
from megatron_ep.fabrics import choice
from megatron_ep.tools.local_ranks import LocalRanks

CASES = [
    (fabric, nodes, ranks) for fabric in ("p2p", *choice.NETWORKS) for nodes, ranks in ((1, 2), (2, 1), (1, 4), (2, 2))
]


def need(fabric, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, not {world}")
    if fabric in choice.NETWORKS:
        try:
            choice.NETWORKS[fabric]()
        except ep.EPError as error:
            pytest.skip(str(error))


def choose(fabric):
    os.environ[choice.VARIABLE] = fabric
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast: no fabric uses it
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    torch.cuda.set_device(dist.get_rank())
    return dist.get_world_size()


def run_or_skip(function, fabric, nodes, ranks_per_node, limit):
    """function(fabric, nodes) on every rank; it returns why the fabric refused these ranks, or None."""
    world = nodes * ranks_per_node
    need(fabric, world)
    with LocalRanks(world, limit) as ranks:
        refusal = ranks.run(function, fabric, nodes)[0]
    if refusal is not None:
        assert fabric == "nccl" and nodes > 1 and "GIN" in refusal, refusal
        pytest.skip(refusal)


def run_round_trips(fabric, nodes):
    """Returns why the fabric refused these ranks, or None."""
    world = choose(fabric)
    for _ in range(3):  # the later ones with what the first one set up and left
        try:
            buffer = make_buffer(nodes, world=world)
        except ep.EPError as error:
            return str(error)
        with buffer:
            round_trips(buffer)
            buffer.reset()
            round_trips(buffer, rounds=4)
    return None


@pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), CASES)
def test_round_trips(fabric, nodes, ranks_per_node):
    run_or_skip(run_round_trips, fabric, nodes, ranks_per_node, 120)


TOKENS = (512, 1024, 700, 513)  # of each rank
TOPK = 3
# Several chunks of the copy engine, the last one full or not; and rows that it does not copy.
ROWS = summed_on_gpus((7168, torch.bfloat16), (4100, torch.float64), (4104, torch.float16), (65, torch.float32))


def run_small_rings(fabric, nodes):
    """Hundreds of rows through rings of one or two: all but the first wait for credit. The host's bits, there and back.

    Returns why the fabric refused these ranks, or None.
    """
    world = choose(fabric)
    generator = torch.Generator().manual_seed(nodes)
    ids = [torch.rand(t, 8, generator=generator).topk(TOPK, dim=1).indices for t in TOKENS[:world]]
    weights = [torch.rand(t, TOPK, generator=generator) for t in TOKENS[:world]]
    for (hidden, dtype), rows_of_ring in product(ROWS, (1, 2)):
        ring_bytes = rows_of_ring * slot_bytes(hidden, dtype, TOPK)
        try:
            buffer = make_buffer(
                nodes, 60.0, world, tuning=ep.Tuning(channels=2, nvl_ring_bytes=ring_bytes, rdma_ring_bytes=ring_bytes)
            )
        except ep.EPError as error:
            return str(error)
        with buffer, ep.LocalCluster(nodes, world // nodes, ep.Config(num_experts=8)) as host:
            mine = buffer.rank
            reals = [torch.randn(t, hidden, generator=generator).to(dtype) for t in TOKENS[:world]]
            expected = ep.dispatch(reals, ids, weights, buffer=host)
            ours = ep.dispatch(reals[mine].cuda(), ids[mine].cuda(), weights[mine].cuda(), buffer=buffer)
            assert torch.equal(ours.probs.cpu(), expected.probs[mine])
            for again in range(2):  # then with the handle
                assert torch.equal(ours.x.cpu(), expected.x[mine]), (hidden, dtype, again)
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                scale = [torch.rand(len(rows), generator=generator).to(wide) for rows in expected.x]
                for factor in (None, scale):
                    y = ep.combine(ours.x, ours.handle, None if factor is None else factor[mine].cuda())
                    assert torch.equal(y.cpu(), ep.combine(expected.x, expected.handle, factor)[mine]), (hidden, dtype)
                if not again:
                    ours = ep.dispatch(reals[mine].cuda(), handle=ours.handle)
                    expected = ep.dispatch(reals, handle=expected.handle)
            buffer.synchronize()
    return None


@pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), CASES)
def test_small_rings(fabric, nodes, ranks_per_node):
    run_or_skip(run_small_rings, fabric, nodes, ranks_per_node, 240)


def run_one_absent(fabric):
    world = choose(fabric)
    buffer = make_buffer(1, timeout=2.0, world=world)
    last = world - 1
    if buffer.rank == last:
        time.sleep(5)
    else:
        x, ids, weights = (part[buffer.rank].cuda() for part in inputs(2, world=world))
        with pytest.raises(ep.EPTimeoutError, match=f"from rank {last}: seen"):
            ep.dispatch(x, ids, weights, buffer=buffer)
    buffer.reset()
    round_trips(buffer)
    buffer.close()


@pytest.mark.parametrize("fabric", ["p2p", *choice.NETWORKS])
def test_an_absent_rank_is_named(fabric):
    need(fabric, 2)
    with LocalRanks(2, 120) as ranks:
        ranks.run(run_one_absent, fabric)


def run_one_dead(fabric):
    choose(fabric)
    buffer = make_buffer(1, timeout=2.0, world=2)
    round_trips(buffer)
    if buffer.rank == 1:
        return  # its process ends without its buffer's other ranks
    buffer.close()


@pytest.mark.parametrize("fabric", ["p2p", *choice.NETWORKS])
def test_a_rank_may_end_alone(fabric):
    need(fabric, 2)
    started = time.monotonic()
    with LocalRanks(2, 120) as ranks:
        ranks.run(run_one_dead, fabric)
    assert time.monotonic() - started < 60


def run_late_replay(fabric):
    """Rank 1 replays a dispatch in which it waits for rank 0, which has tokens for it, and sees it under way."""
    choose(fabric)
    with make_buffer(1, timeout=4.0, world=2) as buffer:
        x, ids, weights = (part[buffer.rank].cuda() for part in inputs(3, world=2))
        handle = ep.dispatch(x, ids, weights, buffer=buffer).handle
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            rows = ep.dispatch(x, topk_weights=weights, handle=handle)
        expected = ep.dispatch(x, topk_weights=weights, handle=handle).x
        buffer.synchronize()
        launches, seen = buffer._group._backend._launches, []
        under_way = launches._under_way
        launches._under_way = lambda: seen.append(under_way()) or seen[-1]
        dist.barrier()
        if buffer.rank == 0:
            time.sleep(2.0)
        graph.replay()
        buffer.raise_if_failed()
        assert torch.equal(rows.x, expected)
        assert buffer.rank == 0 or ("call 3", False) in seen, seen
        graph.replay()
        buffer.synchronize()
        assert torch.equal(rows.x, expected)


@pytest.mark.parametrize("fabric", choice.NETWORKS)
def test_a_replay_is_watched(fabric):
    need(fabric, 2)
    with LocalRanks(2, 120) as ranks:
        ranks.run(run_late_replay, fabric)
