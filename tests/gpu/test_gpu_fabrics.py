"""Each fabric between the GPUs of one machine, a process for each; and tcp, by which the host joins nodes that are
machines by name, whose processes share the GPUs that there are. Nodes are as many as the case says."""

import os
import re
import signal
import time
from dataclasses import replace
from itertools import product

import one_rank
import pytest
import survivors
import torch
import torch.distributed as dist
from cases import slot_bytes, summed_on_gpus
from modes import EXPERTS, GPU, LowLatency, Normal
from process_cases import SIZES, check_cases, check_low_latency_cases, low_latency_inputs, low_latency_of
from waits import patience

import megatron_ep as ep
from megatron_ep.fabrics import choice
from megatron_ep.tools.local_ranks import LocalRanks

OF_GPUS = [
    (fabric, nodes, ranks) for fabric in ("p2p", *choice.NETWORKS) for nodes, ranks in ((1, 2), (2, 1), (1, 4), (2, 2))
]
PLACES = [*OF_GPUS, ("tcp", 2, 1), ("tcp", 2, 2), ("tcp", 4, 1)]

everywhere = pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), PLACES)
BETWEEN_NODES = [place for place in PLACES if place[0] != "p2p"]
OVER_THE_HOST = {choice.VARIABLE: "tcp"}

between_nodes = pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), BETWEEN_NODES)


def need(fabric, world):
    if fabric != "tcp" and torch.cuda.device_count() < world:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, not {world}")
    if fabric in choice.NETWORKS:
        try:
            choice.NETWORKS[fabric]()
        except ep.EPError as error:
            pytest.skip(str(error))


def over(fabric, function, *arguments):
    """function(*arguments) of a rank, whose buffers are over this fabric. Returns why NCCL refused these ranks, or
    None."""
    os.environ[choice.VARIABLE] = fabric
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast: no fabric uses it
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        function(*arguments)
    except ep.EPError as error:
        if "GIN" not in str(error):
            raise
        return str(error)
    return None


def run_over(fabric, world, limit, function, *arguments):
    """`over` on all of so many ranks."""
    need(fabric, world)
    with LocalRanks(world, limit) as ranks:
        refusal = ranks.run(over, fabric, function, *arguments)[0]
    if refusal is not None:
        assert fabric == "nccl", refusal
        pytest.skip(refusal)


def run_round_trips(fabric, nodes):
    for _ in range(3):  # the later ones with what the first one set up and left
        calls = Normal(GPU, nodes, 10.0)
        with calls.buffer:
            assert calls.buffer.fabric == fabric
            calls.round_trips()
            calls.buffer.reset()
            calls.round_trips()


@everywhere
def test_round_trips(fabric, nodes, ranks_per_node):
    run_over(fabric, nodes * ranks_per_node, 120, run_round_trips, fabric, nodes)


CASES = 12  # times SIZES


def run_cases(nodes):
    """Random cases of both modes have the host's bits."""
    world = dist.get_world_size()
    for name, sizes in SIZES.items():
        with ep.Buffer(None, sizes.config(), ep.Topology(nodes, world // nodes), device="cuda") as buffer:
            check_cases(buffer, sizes, range(100 * world, 100 * world + CASES))
            if name == "two_channels":
                check_low_latency_cases(buffer, range(4))


@everywhere
def test_random_cases_have_the_bits_of_the_host(fabric, nodes, ranks_per_node):
    run_over(fabric, nodes * ranks_per_node, 240, run_cases, nodes)


TOKENS = (512, 1024, 700, 513)  # of each rank
TOPK = 3
# Several chunks of the copy engine, the last one full or not; and rows that it does not copy.
ROWS = summed_on_gpus((7168, torch.bfloat16), (4100, torch.float64), (4104, torch.float16), (65, torch.float32))


def run_small_rings(nodes):
    """Hundreds of rows through rings of one or two, all but the first of which wait for credit. The host's bits, there
    and back."""
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(nodes)
    ids = [torch.rand(t, 8, generator=generator).topk(TOPK, dim=1).indices for t in TOKENS[:world]]
    weights = [torch.rand(t, TOPK, generator=generator) for t in TOKENS[:world]]
    for (hidden, dtype), rows_of_ring in product(ROWS, (1, 2)):
        ring_bytes = rows_of_ring * slot_bytes(hidden, dtype, TOPK)
        tuning = ep.Tuning(channels=2, nvl_ring_bytes=ring_bytes, rdma_ring_bytes=ring_bytes)
        buffer = Normal(GPU, nodes, 60.0, tuning=tuning).buffer
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


@pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), OF_GPUS)
def test_small_rings(fabric, nodes, ranks_per_node):
    run_over(fabric, nodes * ranks_per_node, 240, run_small_rings, nodes)


def run_one_dead():
    calls = Normal(GPU, 1)
    calls.round_trips()
    if calls.rank == 1:
        return  # its process ends without its buffer's other ranks
    calls.buffer.close()


@pytest.mark.parametrize("fabric", ["p2p", *choice.NETWORKS])
def test_a_rank_may_end_alone(fabric):
    started = time.monotonic()
    run_over(fabric, 2, 120, run_one_dead)
    assert time.monotonic() - started < 60


def run_late_replay():
    """Rank 1 replays a dispatch in which it waits for rank 0, which has tokens for it, and sees it under way."""
    calls = Normal(GPU, 1, 4.0)
    with calls.buffer as buffer:
        x, ids, weights = calls.own(3)
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
    run_over(fabric, 2, 120, run_late_replay)


def run_in_flight(nodes):
    """Two low-latency calls of a kind under way, received in any order, and a dispatch with a handle, eagerly and in a
    graph that is replayed with other rows."""
    calls = Normal(GPU, nodes, 30.0)
    with calls.buffer as buffer:
        mode, mine = low_latency_of(buffer, 520, torch.float32), buffer.rank
        batches = [low_latency_inputs(seed, calls.world, EXPERTS, 520, torch.float32) for seed in range(2)]
        normal, normal_ids, weights = calls.own(3)
        handle = ep.dispatch(normal, normal_ids, weights, buffer=buffer).handle
        xs = [batch[0][mine].round().cuda() for batch in batches]
        ids = [batch[1][mine].cuda() for batch in batches]

        def step():
            received = [mode.dispatch(x, idx, return_recv_hook=True) for x, idx in zip(xs, ids, strict=True)]
            for _, hook in reversed(received):
                hook()
            back = [mode.combine(part.x, part.handle, return_recv_hook=True) for part, _ in received]
            for _, hook in back:
                hook()
            rows = ep.dispatch(normal, topk_weights=weights, handle=handle)
            return [ep.combine(rows.x, rows.handle), *(y for y, _ in back)]

        def check(sums):
            assert torch.equal(sums[0], 3 * normal)
            for y, x, idx in zip(sums[1:], xs, ids, strict=True):
                assert torch.equal(y, (idx >= 0).sum(dim=1, keepdim=True) * x)

        with torch.no_grad():
            for _ in range(3):
                check(step())
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            buffer.synchronize()
            with torch.cuda.graph(graph, stream=side):
                sums = step()
            for replay in range(4):
                for x in (normal, *xs):
                    x.add_(replay)
                graph.replay()
                torch.cuda.synchronize()
                check(sums)
                if replay == 1:
                    check(step())
                    buffer.synchronize()
        buffer.raise_if_failed()


@between_nodes
def test_two_calls_under_way(fabric, nodes, ranks_per_node):
    run_over(fabric, nodes * ranks_per_node, 120, run_in_flight, nodes)


# Kernels of processes that share a GPU take turns, and are loaded when they are first needed.
PATIENT = replace(GPU, timeout=5.0)


def run_one_absent(nodes, mask_s):
    """The last rank is late: an error that names it, or the others go on without it until a reset, and it ends."""
    last = dist.get_world_size() - 1
    for mode in ("normal", "low latency"):
        message = one_rank.run_one_absent(mode, PATIENT, "dispatch", nodes)
        assert dist.get_rank() == last or re.search(rf"rank {last}\b", message), message
    one_rank.run_one_masked(PATIENT, nodes, mask_s)


@pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), [("p2p", 1, 2), *BETWEEN_NODES])
def test_an_absent_rank_is_named_or_masked(fabric, nodes, ranks_per_node):
    run_over(fabric, nodes * ranks_per_node, 180, run_one_absent, nodes, patience(1.0))


def run_modes_of_buffers():
    """Buffers one after the other: a later one takes the memory that an earlier one has left."""
    for _ in range(3):
        calls = LowLatency(GPU, 1, 10.0)
        with calls.buffer as buffer:
            others = [low_latency_of(buffer, hidden, torch.float32) for hidden in (8, 520)]
            calls.round_trips()
            del others
            buffer.reset()
            calls.round_trips()
        del calls


@pytest.mark.parametrize("fabric", choice.NETWORKS)
def test_memory_serves_later_buffers(fabric):
    run_over(fabric, 2, 120, run_modes_of_buffers)


def test_survivors_over_the_host(tmp_path):
    survivors.check_killed(tmp_path, place=GPU, cause="the connection to rank 1 broke", **OVER_THE_HOST)


def test_a_stopped_process_is_named(tmp_path):
    """Nothing comes from it, and its connections stay."""
    ranks = survivors.start(tmp_path, place=GPU, timeout=3.0, **OVER_THE_HOST)
    ranks[1].send_signal(signal.SIGSTOP)
    try:
        said = [ranks[rank].hear(30) for rank in (0, 2, 3)]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("timed out first, after 3 s" in text for text in said), said
    assert any("rank 1" in text for text in said), said  # the others tell of the first
