"""Each fabric between the GPUs of one machine, a process for each. Nodes are as many as the case says."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from test_gpu_processes import inputs, make_buffer, round_trips

import megatron_ep as ep
from megatron_ep.backends import fabrics
from megatron_ep.bench.local_ranks import LocalRanks

CASES = [
    (fabric, nodes, ranks) for fabric in ("p2p", *fabrics.NETWORKS) for nodes, ranks in ((1, 2), (2, 1), (1, 4), (2, 2))
]


def need(fabric, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, not {world}")
    if fabric in fabrics.NETWORKS:
        try:
            fabrics.NETWORKS[fabric]()
        except ep.EPError as error:
            pytest.skip(str(error))


def choose(fabric):
    os.environ[fabrics.VARIABLE] = fabric
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast: no fabric uses it
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    torch.cuda.set_device(dist.get_rank())
    return dist.get_world_size()


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
    world = nodes * ranks_per_node
    need(fabric, world)
    with LocalRanks(world, 120) as ranks:
        refusal = ranks.run(run_round_trips, fabric, nodes)[0]
    if refusal is not None:
        assert fabric == "nccl" and nodes > 1 and "GIN" in refusal, refusal
        pytest.skip(refusal)


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


@pytest.mark.parametrize("fabric", ["p2p", *fabrics.NETWORKS])
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


@pytest.mark.parametrize("fabric", ["p2p", *fabrics.NETWORKS])
def test_a_rank_may_end_alone(fabric):
    need(fabric, 2)
    started = time.monotonic()
    with LocalRanks(2, 120) as ranks:
        ranks.run(run_one_dead, fabric)
    assert time.monotonic() - started < 60
