"""Each fabric between the GPUs of one machine, a process for each; and tcp, by which the host joins nodes that are
machines by name, whose processes share the GPUs that there are. Nodes are as many as the case says."""

import os
import signal
import time
from itertools import product

import pytest
import survivors
import torch
import torch.distributed as dist
from cases import slot_bytes, summed_on_gpus
from process_cases import (
    SIZES,
    check_cases,
    check_low_latency_cases,
    low_latency_inputs,
    low_latency_of,
)
from test_gpu_processes import inputs, make_buffer, round_trips

import megatron_ep as ep
from megatron_ep.fabrics import choice
from megatron_ep.tools.local_ranks import LocalRanks

OF_GPUS = [
    (fabric, nodes, ranks) for fabric in ("p2p", *choice.NETWORKS) for nodes, ranks in ((1, 2), (2, 1), (1, 4), (2, 2))
]
PLACES = [*OF_GPUS, ("tcp", 2, 1), ("tcp", 2, 2), ("tcp", 4, 1)]
EXPERTS = 8

everywhere = pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), PLACES)
between_nodes = pytest.mark.parametrize(
    ("fabric", "nodes", "ranks_per_node"), [place for place in PLACES if place[0] != "p2p"]
)


def need(fabric, world):
    if fabric != "tcp" and torch.cuda.device_count() < world:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, not {world}")
    if fabric in choice.NETWORKS:
        try:
            choice.NETWORKS[fabric]()
        except ep.EPError as error:
            pytest.skip(str(error))


def run_two(function, fabric):
    need(fabric, 2)
    with LocalRanks(2, 120) as ranks:
        ranks.run(function, fabric)


def choose(fabric):
    os.environ[choice.VARIABLE] = fabric
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast: no fabric uses it
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
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
            assert buffer.fabric == fabric
            round_trips(buffer)
            buffer.reset()
            round_trips(buffer, rounds=4)
    return None


@everywhere
def test_round_trips(fabric, nodes, ranks_per_node):
    run_or_skip(run_round_trips, fabric, nodes, ranks_per_node, 120)


CASES = 12  # times SIZES


def run_cases(fabric, nodes):
    """Random cases of both modes have the host's bits. Returns why the fabric refused these ranks, or None."""
    world = choose(fabric)
    for name, sizes in SIZES.items():
        try:
            buffer = ep.Buffer(None, sizes.config(), ep.Topology(nodes, world // nodes), device="cuda")
        except ep.EPError as error:
            return str(error)
        with buffer:
            check_cases(buffer, sizes, range(100 * world, 100 * world + CASES))
            if name == "two_channels":
                check_low_latency_cases(buffer, range(4))
                round_trips(buffer, rounds=1)
    return None


@everywhere
def test_random_cases_have_the_bits_of_the_host(fabric, nodes, ranks_per_node):
    run_or_skip(run_cases, fabric, nodes, ranks_per_node, 240)


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


@pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), OF_GPUS)
def test_small_rings(fabric, nodes, ranks_per_node):
    run_or_skip(run_small_rings, fabric, nodes, ranks_per_node, 240)


def run_one_absent(fabric):
    world = choose(fabric)
    buffer = make_buffer(2 if fabric == "tcp" else 1, timeout=2.0, world=world)
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


@pytest.mark.parametrize("fabric", ["p2p", *choice.NETWORKS, "tcp"])
def test_an_absent_rank_is_named(fabric):
    run_two(run_one_absent, fabric)


def run_one_dead(fabric):
    choose(fabric)
    buffer = make_buffer(1, timeout=2.0, world=2)
    round_trips(buffer)
    if buffer.rank == 1:
        return  # its process ends without its buffer's other ranks
    buffer.close()


@pytest.mark.parametrize("fabric", ["p2p", *choice.NETWORKS])
def test_a_rank_may_end_alone(fabric):
    started = time.monotonic()
    run_two(run_one_dead, fabric)
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
    run_two(run_late_replay, fabric)


def run_in_flight(fabric, nodes):
    """Two low-latency calls of a kind under way, received in any order, and a dispatch with a handle, eagerly and in a
    graph that is replayed with other rows.

    Returns why the fabric refused these ranks, or None."""
    world = choose(fabric)
    try:
        buffer = make_buffer(nodes, 30.0, world)
    except ep.EPError as error:
        return str(error)
    with buffer:
        mode, mine = low_latency_of(buffer, 520, torch.float32), buffer.rank
        batches = [low_latency_inputs(seed, world, EXPERTS, 520, torch.float32) for seed in range(2)]
        normal, normal_ids, weights = (part[mine].cuda() for part in inputs(3, world=world))
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
    return None


@between_nodes
def test_two_calls_under_way(fabric, nodes, ranks_per_node):
    run_or_skip(run_in_flight, fabric, nodes, ranks_per_node, 120)


def whole_trip(mode, active):
    """A dispatch and its combine, without the choices of ranks that are not active."""
    world, mine = mode.buffer.topology.world_size, mode.buffer.rank
    x, ids, _ = (part[mine].cuda() for part in low_latency_inputs(1, world, EXPERTS, 520, torch.float32))
    received = mode.dispatch(x, ids)
    y = mode.combine(received.x, received.handle)
    choices = (ids >= 0) & torch.tensor(active).cuda()[ids.clamp_min(0) // (EXPERTS // world)]
    mode.buffer.synchronize()
    assert torch.allclose(y, choices.sum(dim=1, keepdim=True) * x)


def run_one_absent_with_few_tokens(fabric, nodes):
    """The last rank is late: an error that names it, or the others go on without it until a reset, and it
    ends.

    Returns why the fabric refused these ranks."""
    world = choose(fabric)
    try:
        buffer = make_buffer(nodes, 3.0, world)
    except ep.EPError as error:
        return str(error)
    last = world - 1
    is_last = buffer.rank == last
    mode = low_latency_of(buffer, 520, torch.float32)
    whole_trip(mode, [True] * world)
    dist.barrier()
    if is_last:
        time.sleep(7)
    else:
        with pytest.raises(ep.EPTimeoutError, match=rf"rank {last}\b"):
            whole_trip(mode, [True] * world)
    buffer.reset()
    whole_trip(mode, [True] * world)
    masking = low_latency_of(buffer, 520, torch.float32, on_dead_rank="mask", mask_timeout=0.5)
    for _ in range(2):
        dist.barrier()  # kernels are loaded in the first round
        whole_trip(masking, [True] * world)
    dist.barrier()
    if is_last:
        time.sleep(1.5)
        for _ in range(2):
            with pytest.raises(ep.EPMaskedError, match=f"rank {last} came too late"):
                whole_trip(masking, [True] * world)
    else:
        for _ in range(3):
            whole_trip(masking, [True] * last + [False])
    assert masking.masked_ranks() == ([] if is_last else [last])
    buffer.reset()
    whole_trip(masking, [True] * world)
    with pytest.raises(ep.EPError, match=f"this buffer's fabric, {fabric}"):
        masking.readmit(last, dist.HashStore())
    buffer.close()
    return None


@between_nodes
def test_an_absent_rank_is_named_or_masked(fabric, nodes, ranks_per_node):
    run_or_skip(run_one_absent_with_few_tokens, fabric, nodes, ranks_per_node, 120)


def run_modes_of_buffers(fabric):
    """Buffers one after the other: a later one takes the memory that an earlier one has left."""
    world = choose(fabric)
    for _ in range(3):
        with make_buffer(1, world=world) as buffer:
            modes = [low_latency_of(buffer, hidden, torch.float32) for hidden in (520, 8, 520)]
            for mode in (modes[0], modes[2]):
                whole_trip(mode, [True] * world)
            buffer.reset()
            whole_trip(modes[2], [True] * world)
        del modes, mode


@pytest.mark.parametrize("fabric", choice.NETWORKS)
def test_memory_serves_later_buffers(fabric):
    run_two(run_modes_of_buffers, fabric)


def test_survivors_over_the_host(tmp_path, monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "tcp")
    survivors.check_killed(tmp_path, "cuda", "the connection to rank 1 broke")


def test_a_stopped_process_is_named(tmp_path, monkeypatch):
    """Nothing comes from it, and its connections stay."""
    monkeypatch.setenv(choice.VARIABLE, "tcp")
    monkeypatch.setattr(survivors, "SURVIVOR", survivors.SURVIVOR.replace("timeout=30", "timeout=3"))
    processes = survivors.start_survivors(tmp_path, "cuda")
    processes[1].send_signal(signal.SIGSTOP)
    try:
        outputs = [processes[rank].communicate(timeout=30)[0] for rank in (0, 2, 3)]
    finally:
        for process in processes:
            process.kill()
    assert all("timed out first, after 3 s" in output for output in outputs), outputs
    assert any("rank 1" in output for output in outputs), outputs  # the others tell of the first
